from __future__ import annotations

from abc import ABC
from collections import deque
from typing import Any, cast

from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ConvertCallback


class BaseAlgorithm(ABC):  # noqa: B024
    def __init__(self, learning_starts: int = 3) -> None:
        self.num_timesteps = 0
        self.learning_starts = learning_starts
        self.gradient_steps = 1
        self._n_updates = 0
        self._total_timesteps = 0
        self.ep_info_buffer: deque[dict[str, Any]] = deque(maxlen=100)

    def _init_callback(self, callback: Any, progress_bar: bool = False) -> BaseCallback:
        if isinstance(callback, list):
            callback = CallbackList(callback)
        if not isinstance(callback, BaseCallback):
            callback = ConvertCallback(callback)
        made: BaseCallback = callback
        made.init_callback(cast(Any, self))
        return made

    def learn(self, total: int, callback: Any = None, reset_num_timesteps: bool = True) -> Any:
        if reset_num_timesteps:
            self.num_timesteps = 0
        else:
            total += self.num_timesteps
        self._total_timesteps = total
        callback = self._init_callback(callback)
        callback.on_training_start(locals(), globals())
        while self.num_timesteps < total:
            self.num_timesteps += 1
            callback.update_locals(locals())
            if not callback.on_step():
                break
            if self.num_timesteps > self.learning_starts and hasattr(self, "_n_updates"):
                self._n_updates += self.gradient_steps
        callback.on_training_end()
        return self
