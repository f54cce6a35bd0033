"""What every verb shares: its options, its connection, how it ends.  Light: see cli/__init__."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rlq.errors import UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from rlq.client import Client

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class App:
    """Passed from the group to its verbs."""

    socket: str | None = None
    host: str | None = None
    autostart: bool = True
    json: bool = False

    def client(self, *, autostart: bool = True, timeout_s: float = 30.0) -> Client:
        from rlq.client import Client

        return Client(
            self.socket,
            host=self.host,
            autostart=self.autostart and autostart,
            timeout_s=timeout_s,
        )

    @property
    def remote_host(self) -> str | None:
        """The other machine that the command is about; None: this one."""
        if self.host is None and not os.environ.get("RLQ_HOST"):
            return None
        from rlq.remote import chosen_host

        return chosen_host(self.socket, self.host)

    def require_here(self, what: str, command: str, *, flags: str = "") -> None:
        """
        Raises:
            UsageError: the command is about another machine.  `what` says why it cannot be,
                `command` and `flags` what to give to ssh instead.
        """
        if (host := self.remote_host) is not None:
            from rlq.remote import parse_host

            name = parse_host(host)[0]
            raise UsageError(f"{what} {name}", hint=f"ssh {flags}{name} {command}")


def verb(
    name: str, *, json: bool = True, cls: type[click.Command] | None = None, **attrs: Any
) -> Callable[[Callable[..., None]], click.Command]:
    """A command whose function gets `app: App` first, with the options that all verbs have."""

    def decorate(function: Callable[..., None]) -> click.Command:
        wrapped: Callable[..., Any] = click.pass_obj(function)
        if json:
            wrapped = click.option(
                "--json",
                is_flag=True,
                expose_value=False,
                is_eager=True,
                callback=_set_json,
                help="One JSON document instead of text.",
            )(wrapped)
        wrapped = click.option(
            "--no-autostart",
            is_flag=True,
            expose_value=False,
            callback=_forbid_autostart,
            hidden=True,
        )(wrapped)
        wrapped = click.option(
            "--host",
            metavar="HOST",
            expose_value=False,
            callback=_set_host,
            hidden=True,
        )(wrapped)
        wrapped = click.option(
            "--socket",
            metavar="PATH",
            expose_value=False,
            callback=_set_socket,
            hidden=True,
            shell_complete=lazy_complete_files,
        )(wrapped)
        return click.command(name, cls=cls or click.Command, **attrs)(wrapped)

    return decorate


def lazy_complete_files(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from rlq.cli.complete import complete_files

    return complete_files(ctx, param, incomplete)


def _app(ctx: click.Context) -> App:
    app = ctx.ensure_object(App)
    assert isinstance(app, App)
    return app


def _set_json(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        _app(ctx).json = True


def _set_socket(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    if value is not None:
        if not value:
            raise UsageError("--socket is empty", hint="--socket /path/of/rlqd.sock")
        _app(ctx).socket = value


def _set_host(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    if value is not None:
        _app(ctx).host = value


def _forbid_autostart(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        _app(ctx).autostart = False


# ---- values of options -------------------------------------------------------------


class Parsed(click.ParamType[Any]):
    """A click type out of a function that raises UsageError."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except UsageError as error:
            where = f" (in {'/'.join(param.opts)})" if param is not None else ""
            raise UsageError(f"{error.message}{where}", hint=error.hint) from None


def whole(what: str, least: int, most: int, *, hint: str | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        digits = text.strip()
        body = digits.removeprefix("-") if least < 0 else digits
        if not (body.isascii() and body.isdigit() and len(body) < 20):
            raise UsageError(
                f"{text!r} is not {what}", hint=hint or f"a whole number from {least} to {most}"
            )
        if not least <= int(digits) <= most:
            raise UsageError(f"{text} is not {what} that can be", hint=f"from {least} to {most}")
        return int(digits)

    return parse


# ---- talking -----------------------------------------------------------------------


def is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def shows_escapes(stream: Any) -> bool:
    """A terminal whose user lets it be coloured and drawn on (no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def note(text: str) -> None:
    """Talk: to people, on stderr."""
    click.echo(text, err=True)


def warn(text: str) -> None:
    _say("warning:", "yellow", text)


def fail_json(kind: str, message: str, hint: str | None) -> None:
    """The same as `fail` tells people, as the document that --json promises."""
    from rlq.cli.output import print_json

    print_json({"error": {"kind": kind, "message": message, "hint": hint}})


def fail(message: str, hint: str | None, code: int) -> int:
    """Tell what went wrong; `code`."""
    _say("error:", "red", message)
    if hint:
        _say("hint:", "cyan", hint)
    return code


def _say(label: str, colour: str, text: str) -> None:
    from rlq.cli.output import folded

    first, *more = (
        part for line in f"{label} {text}".split("\n") for part in folded(line, 0, on_stderr=True)
    )
    note(_styled(label, colour) + first.removeprefix(label))
    for line in more:
        note(line)


def _styled(text: str, colour: str) -> str:
    if not shows_escapes(sys.stderr):
        return text
    return click.style(text, fg=colour, bold=True)


def message_of(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption):
        return f"there is no option {error.option_name}"  # the near ones are the hint's
    message = error.format_message()
    return message[:1].lower() + message[1:].rstrip(".")


def hint_for(error: click.ClickException) -> str:
    """A hint for what click itself refuses."""
    given: str | None = getattr(error, "hint", None)
    if given:
        return given
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    path = ctx.command_path if ctx is not None else "rlq"
    if isinstance(error, click.NoSuchOption):
        from difflib import get_close_matches

        near = get_close_matches(error.option_name, error.possibilities or (), cutoff=0.7)
        if near:
            return f"did you mean {' or '.join(near)}?"
        if path.split()[-1] == "submit":
            return (
                "options of your own command go after it:"
                f" rlq submit -- python train.py {error.option_name}"
            )
    return f"`{path} --help` shows what it takes"


def quiet_exit() -> int:
    """The reader of stdout went away: no more output, not even at exit; as if by SIGPIPE."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return 141  # not a real file: nothing will be flushed to it either
    return 141
