from __future__ import annotations

from collections.abc import Callable
from typing import Any


class BaseCallback:
    model: Any

    def __init__(self, verbose: int = 0) -> None:
        self.verbose = verbose
        self.locals: dict[str, Any] = {}

    def init_callback(self, model: Any) -> None:
        self.model = model
        self._init_callback()

    def _init_callback(self) -> None:
        pass

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        self.locals = locals_

    def on_step(self) -> bool:
        return self._on_step()

    def _on_step(self) -> bool:
        return True

    def on_training_end(self) -> None:
        pass

    def update_locals(self, locals_: dict[str, Any]) -> None:
        self.locals.update(locals_)


class CallbackList(BaseCallback):
    def __init__(self, callbacks: list[BaseCallback]) -> None:
        super().__init__()
        self.callbacks = callbacks

    def _init_callback(self) -> None:
        for callback in self.callbacks:
            callback.init_callback(self.model)

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_training_start(locals_, globals_)

    def on_step(self) -> bool:
        goes_on = True
        for callback in self.callbacks:
            goes_on = callback.on_step() and goes_on
        return goes_on

    def on_training_end(self) -> None:
        for callback in self.callbacks:
            callback.on_training_end()

    def update_locals(self, locals_: dict[str, Any]) -> None:
        for callback in self.callbacks:
            callback.update_locals(locals_)


class ConvertCallback(BaseCallback):
    def __init__(self, function: Callable[[], object] | None) -> None:
        super().__init__()
        self.function = function

    def _on_step(self) -> bool:
        return self.function is None or self.function() is not False
