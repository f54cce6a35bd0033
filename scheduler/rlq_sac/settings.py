"""What one training is asked to do, and how it is written on the command line.

The tables of SAC's keywords stand here, not read from the classes, because `plan` must answer
in a blink and importing torch takes seconds; tests compare them with the real signatures.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal

from rlq.errors import UsageError

Algo = Literal["sb3", "sbx"]
Device = Literal["auto", "cpu", "cuda"]

STEPS_MAX = 10**12
SEED_MAX = 2**31 - 1
#: What SB3 and SBX use when `buffer_size` is not set.
BUFFER_SIZE_DEFAULT = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One training.  A `*_freq` counts environment steps; 0: only at the end (or on a stop)."""

    algo: Algo
    env: str
    steps: int
    seed: int
    device: Device
    n_envs: int
    #: SAC constructor keywords, checked; `policy_kwargs` and `replay_buffer_kwargs` are dicts.
    keywords: Mapping[str, Any]
    out: Path
    eval_freq: int
    eval_episodes: int
    checkpoint_freq: int
    save_buffer: bool
    resume: bool

    def identity(self) -> dict[str, Any]:
        """What must not change when a run is resumed, as JSON data."""
        return {
            "algo": self.algo,
            "env": self.env,
            "seed": self.seed,
            "n_envs": self.n_envs,
            "set": _as_json(self.keywords),
        }


# ---- values ------------------------------------------------------------------------


def parse_steps(text: str) -> int:
    """Steps of '700000', '700_000', '7e5', '700k', '1.5M'.

    Raises:
        UsageError: not a whole number from 1 to 10**12.
    """
    hint = "write 700000, 7e5 or 700k"
    match = re.fullmatch(
        r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)([kKmM]?)", text.strip()
    )
    if match is None:
        raise UsageError(f"{text!r} is not a number of steps", hint=hint)
    try:
        number = Decimal(match[1]) * {"": 1, "k": 1000, "m": 1_000_000}[match[2].lower()]
    except InvalidOperation:
        raise UsageError(f"{text!r} is not a number of steps", hint=hint) from None
    if number != number.to_integral_value() or not 1 <= number <= STEPS_MAX:
        raise UsageError(f"{text!r} is not a whole number of steps from 1 to 1e12", hint=hint)
    return int(number)


def _whole(low: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise ValueError("a whole number")
        if value < low:
            raise ValueError(f"a whole number from {low}")
        return int(value)

    return check


def _number(low: float, high: float, *, low_open: bool = False) -> Callable[[Any], float]:
    wanted = f"a number {'above' if low_open else 'from'} {low:g}"
    if high != math.inf:
        wanted += f" up to {high:g}"

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(wanted)
        if not (low <= value <= high) or (low_open and value == low) or math.isinf(value):
            raise ValueError(wanted)
        return float(value)

    return check


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("True or False")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a text")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError("a dictionary such as {'key': 1}")
    return value


def _whole_list(value: Any) -> list[int]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("a list such as [256, 256]")
    return [_whole(1)(item) for item in value]


def _net_arch(value: Any) -> list[int] | dict[str, list[int]]:
    if isinstance(value, dict):
        if set(value) != {"pi", "qf"}:
            raise ValueError("a list such as [256, 256] or {'pi': [256], 'qf': [256]}")
        return {name: _net_arch_list(layers) for name, layers in value.items()}
    return _net_arch_list(value)


def _net_arch_list(value: Any) -> list[int]:
    return [] if value == [] else _whole_list(value)


def _ent_coef(value: Any) -> str | float:
    if isinstance(value, str) and re.fullmatch(r"auto(_[0-9.]+(e-?[0-9]+)?)?", value):
        return value
    try:
        return _number(0, math.inf)(value)
    except ValueError:
        raise ValueError("a number from 0, 'auto' or 'auto_0.1'") from None


def _target_entropy(value: Any) -> str | float:
    if value == "auto":
        return "auto"
    try:
        return _number(-1e9, 1e9)(value)
    except ValueError:
        raise ValueError("a number or 'auto'") from None


def _train_freq(value: Any) -> int | tuple[int, str]:
    if isinstance(value, list | tuple) and len(value) == 2 and value[1] in ("step", "episode"):
        return (_whole(1)(value[0]), value[1])
    try:
        return _whole(1)(value)
    except ValueError:
        raise ValueError("a whole number from 1, or (1, 'episode')") from None


#: Names of activation functions; `training` finds them in torch.nn or flax.linen.
ACTIVATIONS = ("relu", "tanh", "elu", "gelu", "silu", "leaky_relu")


def _activation(value: Any) -> str:
    if value not in ACTIVATIONS:
        raise ValueError(f"one of {', '.join(ACTIVATIONS)}")
    return str(value)


# ---- SAC's keywords ----------------------------------------------------------------

_Check = Callable[[Any], Any]
_positive = _number(0, math.inf, low_open=True)

_COMMON: dict[str, _Check] = {
    "learning_rate": _positive,
    "buffer_size": _whole(1),
    "learning_starts": _whole(0),
    "batch_size": _whole(1),
    "tau": _number(0, 1, low_open=True),
    "gamma": _number(0, 1),
    "train_freq": _train_freq,
    "gradient_steps": _whole(-1),
    "replay_buffer_kwargs": _mapping,
    "n_steps": _whole(1),
    "ent_coef": _ent_coef,
    "target_entropy": _target_entropy,
    "use_sde": _flag,
    "sde_sample_freq": _whole(-1),
    "use_sde_at_warmup": _flag,
    "stats_window_size": _whole(1),
    "tensorboard_log": _text,
    "policy_kwargs": _mapping,
}
KEYWORDS: dict[Algo, dict[str, _Check]] = {
    "sb3": {**_COMMON, "optimize_memory_usage": _flag, "target_update_interval": _whole(1)},
    "sbx": {
        **_COMMON,
        "qf_learning_rate": _positive,
        "policy_delay": _whole(1),
        "param_resets": _whole_list,
    },
}
#: Keywords of the constructors that are options of ours, or objects that no text can name.
NOT_KEYWORDS = frozenset(
    {
        "policy",
        "env",
        "seed",
        "device",
        "verbose",
        "action_noise",
        "replay_buffer_class",
        "_init_setup_model",
    }
)
_POLICY_COMMON: dict[str, _Check] = {
    "net_arch": _net_arch,
    "activation_fn": _activation,
    "log_std_init": _number(-1e9, 1e9),
    "use_expln": _flag,
    "clip_mean": _number(0, math.inf),
    "n_critics": _whole(1),
    "optimizer_kwargs": _mapping,
}
POLICY_KEYWORDS: dict[Algo, dict[str, _Check]] = {
    "sb3": {**_POLICY_COMMON, "share_features_extractor": _flag},
    "sbx": {**_POLICY_COMMON, "dropout_rate": _number(0, 1), "layer_norm": _flag},
}
_REPLAY_KEYWORDS: dict[str, _Check] = {"handle_timeout_termination": _flag}


def parse_keywords(algo: Algo, n_envs: int, pairs: Iterable[str]) -> dict[str, Any]:
    """SAC constructor keywords of 'key=value' texts; a later one replaces an earlier one.

    Values are Python literals (`1e-3`, `[256, 256]`, `True`); a bare word is a text.
    `policy_kwargs.net_arch=[64, 64]` sets one entry of a dictionary.

    Raises:
        UsageError: no such keyword, a value it cannot take, or keywords that contradict.
    """
    keywords: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip()
        if not equals or not name:
            raise UsageError(
                f"--set {pair!r} is not key=value", hint="write --set learning_starts=1000"
            )
        value = _literal(text.strip())
        outer, dot, inner = name.partition(".")
        if dot and outer in ("policy_kwargs", "replay_buffer_kwargs"):
            _check_inner(algo, outer, {inner: value})
            keywords.setdefault(outer, {})[inner] = _check_inner(algo, outer, {inner: value})[
                inner
            ]
            continue
        _known(name, KEYWORDS[algo], algo, KEYWORDS)
        checked = _checked(name, KEYWORDS[algo][name], value)
        if name in ("policy_kwargs", "replay_buffer_kwargs"):
            checked = _check_inner(algo, name, checked)
        keywords[name] = checked
    _check_together(algo, n_envs, keywords)
    return keywords


def _check_inner(algo: Algo, outer: str, values: Mapping[str, Any]) -> dict[str, Any]:
    tables = (
        POLICY_KEYWORDS
        if outer == "policy_kwargs"
        else dict.fromkeys(POLICY_KEYWORDS, _REPLAY_KEYWORDS)
    )
    for name in values:
        _known(name, tables[algo], algo, tables, prefix=f"{outer}.")
    return {name: _checked(f"{outer}.{name}", tables[algo][name], v) for name, v in values.items()}


def _known(
    name: str,
    table: Mapping[str, _Check],
    algo: Algo,
    tables: Mapping[Algo, Mapping[str, _Check]],
    *,
    prefix: str = "",
) -> None:
    if name in table:
        return
    for other, theirs in tables.items():
        if name in theirs:
            raise UsageError(
                f"{prefix}{name} is no keyword of {algo}'s SAC, only of {other}'s",
                hint=f"use --algo {other} or leave it out",
            )
    if name in NOT_KEYWORDS and not prefix:
        raise UsageError(
            f"{name} cannot be given with --set",
            hint="algorithm, environment, seed and device have options of their own",
        )
    near = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"there are {', '.join(sorted(table))}"
    raise UsageError(f"SAC has no keyword {prefix + name!r}", hint=hint)


def _checked(name: str, check: _Check, value: Any) -> Any:
    try:
        return check(value)
    except (ValueError, OverflowError) as error:
        wanted = str(error) if isinstance(error, ValueError) else "a finite number"
        raise UsageError(f"{name}={value!r} is not possible", hint=f"it is {wanted}") from None


def _check_together(algo: Algo, n_envs: int, keywords: Mapping[str, Any]) -> None:
    train_freq = keywords.get("train_freq")
    if n_envs > 1 and isinstance(train_freq, tuple) and train_freq[1] == "episode":
        raise UsageError(
            "train_freq in episodes works with one environment only",
            hint="leave --n-envs at 1, or give train_freq in steps",
        )
    replay = keywords.get("replay_buffer_kwargs", {})
    if keywords.get("optimize_memory_usage") and replay.get("handle_timeout_termination", True):
        raise UsageError(
            "optimize_memory_usage=True does not go with the handling of time limits",
            hint="add --set replay_buffer_kwargs.handle_timeout_termination=False",
        )


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in sorted(value.items())}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value
