"""What libraries that build on SB3 do (sb3-contrib's MaskablePPO): a hook of their own."""

from __future__ import annotations

from typing import Any

from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, ConvertCallback


class Standalone(BaseAlgorithm):
    def _init_callback(self, callback: Any, use_masking: bool = True) -> BaseCallback:
        converted = ConvertCallback(callback)
        converted.init_callback(self)
        return converted


class Cooperating(BaseAlgorithm):
    def _init_callback(self, callback: Any, progress_bar: bool = False) -> BaseCallback:
        return super()._init_callback(callback, progress_bar)
