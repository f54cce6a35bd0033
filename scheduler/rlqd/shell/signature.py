"""Which jobs are alike: the program, and those of its options that decide what it costs.

A signature is for people too (`rlq profile` lists them): `train.py algo=sac env=Humanoid-v5`.
Seeds, output folders and learning rates are left out; they change results, not speed.  So is
the device where it follows from where the daemon puts the job: what is learned on a device is
kept under that device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from rlq.protocol.messages import JobSpec

#: Options by the names that training scripts give them, and the one name used here.
TELLING_OPTIONS = {
    "algo": "algo",
    "algorithm": "algo",
    "env": "env",
    "env-id": "env",
    "environment": "env",
    "policy": "policy",
    "model": "model",
    "batch-size": "batch_size",
    "n-envs": "n_envs",
    "num-envs": "n_envs",
    "net-arch": "net_arch",
    "device": "device",
    "gradient-steps": "gradient_steps",
    "train-freq": "train_freq",
    "buffer-size": "buffer_size",
    "set": "",  # key=value: judged by its key
}
CHARS_MAX = 200
_INTERPRETER = re.compile(r"(python|pypy)[\d.]*|bash|sh|zsh|env|nice|uv|run|conda|poetry|time")


def signature_of(spec: JobSpec) -> str:
    """`--like NAME` if the user named one; "" where nothing tells one program from another."""
    if spec.like:
        return spec.like[:CHARS_MAX]
    program = _program(spec.argv)
    if program is None:
        return ""
    telling = sorted(set(_telling(spec.argv)) - _where_it_runs(spec))
    return " ".join([program, *telling])[:CHARS_MAX]


def learned_as(signature: str, uid: int) -> str:
    """The name under which the daemon learns of a user's program.

    Another user's is theirs alone: on a shared machine nobody must be able to name a job so that
    what is charged and packed of others' jobs goes by what it does.
    """
    return signature if not signature or uid == os.geteuid() else f"{uid}:{signature}"


def shown_as(learned: str, viewer_uid: int, *, sees_all: bool) -> str | None:
    """The signature to somebody who looks; None: it is not theirs.  Administrators see all, as
    `Forget` names them."""
    if sees_all:
        return learned
    mine = f"{viewer_uid}:"
    return learned.removeprefix(mine) if learned.startswith(mine) else None


def _where_it_runs(spec: JobSpec) -> set[str]:
    """Only a job that may hold a GPU and leaves it alone (`--device cpu`) is another program."""
    follows = {"device=auto", "device=cuda", "device=gpu"}
    return follows | {"device=cpu"} if spec.resources.gpus == 0 else follows


def _program(argv: Sequence[str]) -> str | None:
    """The script or module, past interpreters and their options; None: code given with -c."""
    words = iter(argv)
    for word in words:
        if word == "-c":
            return None
        if word == "-m":
            return next(words, "-m")
        if word.startswith("-") or "=" in word or _INTERPRETER.fullmatch(os.path.basename(word)):
            continue
        return os.path.basename(word)
    return os.path.basename(argv[0])


def _telling(argv: Sequence[str]) -> Iterator[str]:
    words = list(argv)
    for at, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        if not equals:
            value = words[at + 1] if at + 1 < len(words) else ""
        name = name.replace("_", "-").lower()
        if name == "set":
            name, _, value = value.partition("=")
            name = name.replace("_", "-").lower()
        if (known := TELLING_OPTIONS.get(name)) and value and not value.startswith("--"):
            yield f"{known}={value}"
