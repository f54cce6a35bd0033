"""Secrets don't print: which variables and words of a command are likely to be one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

MASK = "****"
_VARIABLE = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIAL", re.IGNORECASE)
_SECRET_WORDS = frozenset(
    {"token", "secret", "password", "passwd", "credential", "credentials", "apikey"}
)
#: `key` alone is often harmless (--sort-key); after these it is not.
_KEY_OF = frozenset({"api", "access", "private", "secret", "auth", "account", "signing"})
_ASSIGNMENT = re.compile(r"(?P<name>-{0,2}[A-Za-z_][\w.-]*)=(?P<value>.+)", re.DOTALL)
_URL_PASSWORD = re.compile(r"(?P<before>\b[a-z][a-z0-9+.-]*://[^/\s:@]*:)[^/\s@]+(?=@)")


def is_secret_variable(name: str) -> bool:
    return _VARIABLE.search(name) is not None


def mask_env(env: dict[str, str]) -> dict[str, str]:
    return {
        name: MASK if value and is_secret_variable(name) else mask_word(value)
        for name, value in env.items()
    }


def mask_argv(argv: Sequence[str]) -> list[str]:
    """`--token abc`, `--api-key=abc`, `WANDB_API_KEY=abc` and `https://me:abc@host` without the
    abc.  What a secret looks like is a guess: better not to put one on a command line."""
    masked: list[str] = []
    value_next = False
    for word in argv:
        if value_next and not word.startswith("-"):
            masked.append(MASK)
            value_next = False
            continue
        value_next = word.startswith("-") and "=" not in word and _is_secret_option(word)
        masked.append(mask_word(word))
    return masked


def mask_word(word: str) -> str:
    assignment = _ASSIGNMENT.fullmatch(word)
    if assignment is not None:
        name = assignment["name"]
        # `env WANDB_API_KEY=… python`: names in capitals are variables.
        if _is_secret_option(name) or (name.isupper() and is_secret_variable(name)):
            return f"{name}={MASK}"
    return _URL_PASSWORD.sub(rf"\g<before>{MASK}", word)


def _is_secret_option(name: str) -> bool:
    words = [word for word in re.split(r"[-_.]+", name.lower()) if word]
    return any(word in _SECRET_WORDS for word in words) or any(
        word == "key" and before in _KEY_OF for before, word in pairwise(words)
    )
