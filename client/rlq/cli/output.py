"""Tables for people, tab-separated lines for pipes, one JSON document for programs."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
import msgspec

from rlq.cli.app import is_terminal
from rlq.cli.masking import mask_argv
from rlq.protocol.messages import Job

if TYPE_CHECKING:
    from rich.console import Console

#: Columns left to what stands beside a full row.
REST_LEAST = 20
#: What a field shows that has no value.
NONE = "-"


def plain(value: Any, *, reveal: bool = False) -> Any:
    """Structs as dicts with ALL their fields: on the wire defaults are left out, but a script
    should find `exit_code: null` where it looks for it.  Secrets in commands are masked."""
    if isinstance(value, msgspec.Struct):
        fields = {
            name: plain(getattr(value, name), reveal=reveal) for name in value.__struct_fields__
        }
        if isinstance(value, Job) and not reveal:
            fields["argv"] = mask_argv(value.argv)
        return fields
    if isinstance(value, dict):
        return {key: plain(item, reveal=reveal) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, reveal=reveal) for item in value]
    return value


def print_json(value: Any, *, reveal: bool = False) -> None:
    document = msgspec.json.encode(plain(value, reveal=reveal))
    click.echo(msgspec.json.format(document, indent=2).decode())


def print_tsv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    lines = ["\t".join(header)]
    lines += ["\t".join(clean(str(cell)) for cell in row) for row in rows]
    click.echo("\n".join(lines))


def clean(text: str) -> str:
    """`text` without what could move the cursor or start a new line: names and commands are
    other people's."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def stdout_is_terminal() -> bool:
    return is_terminal(sys.stdout)


def console(*, stderr: bool = False) -> Console:
    """rich's console: COLUMNS and pipes are its business.  Under NO_COLOR it would still send
    bold and dim."""
    from rich.console import Console

    return Console(
        stderr=stderr,
        highlight=False,
        soft_wrap=False,
        emoji=False,
        markup=False,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
    )


@dataclass(frozen=True)
class Cell:
    text: str
    style: str = ""


@dataclass(frozen=True)
class Column:
    title: str
    #: "left" or "right"
    align: str = "left"
    #: Narrowed last to first when the terminal is too small; 0: never.
    least: int = 0


@dataclass(frozen=True)
class Row:
    cells: Sequence[Cell | str]
    #: Printed from the column after the last cell to the edge: why a job waits.
    rest: Cell | None = None


def print_table(columns: Sequence[Column], rows: Sequence[Row]) -> None:
    """Columns as wide as they need to be; those with `least` give way on a small terminal.

    By hand on rich's Text and not by rich's Table, whose cells cannot span columns.
    """
    from rich.text import Text

    out = console()
    widths = [len(column.title) for column in columns]
    for row in rows:
        for i, cell in enumerate(row.cells):
            widths[i] = max(widths[i], Text(_text(cell)).cell_len)
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= out.width else 1
    beside = any(row.rest is not None and len(row.cells) == len(columns) for row in rows)
    room = out.width - (REST_LEAST + gap if beside else 0)
    excess = sum(widths) + gap * (len(widths) - 1) - room
    for i in reversed(range(len(columns))):
        if excess > 0 and columns[i].least:
            cut = min(excess, widths[i] - min(widths[i], columns[i].least))
            widths[i] -= cut
            excess -= cut
    lines = [_line([Cell(c.title, "bold") for c in columns], columns, widths, gap)]
    for row in rows:
        line = _line(row.cells, columns, widths, gap)
        if row.rest is not None:
            line.append(" " * gap)
            rest = Text(clean(row.rest.text), style=row.rest.style)
            rest.truncate(max(1, out.width - line.cell_len), overflow="ellipsis")
            line.append_text(rest)
        line.rstrip()
        lines.append(line)
    for line in lines:
        out.print(line, no_wrap=True, crop=False, overflow="ignore")


def _text(cell: Cell | str) -> str:
    return clean(cell.text if isinstance(cell, Cell) else cell)


def _line(
    cells: Sequence[Cell | str], columns: Sequence[Column], widths: Sequence[int], gap: int
) -> Any:
    from rich.text import Text

    line = Text()
    for i, cell in enumerate(cells):
        part = Text(_text(cell), style=cell.style if isinstance(cell, Cell) else "")
        part.truncate(widths[i], overflow="ellipsis")
        padding = " " * (widths[i] - part.cell_len)
        if i:
            line.append(" " * gap)
        if columns[i].align == "right":
            line.append(padding)
            line.append_text(part)
        else:
            line.append_text(part)
            line.append(padding)
    return line


#: Where the values of `print_fields` begin.
FIELD_INDENT = 12


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """`name   value` lines; a value of several lines is indented; "" is left out."""
    for name, value in fields:
        if value:
            first, *more = [
                part for line in value.split("\n") for part in folded(line, FIELD_INDENT)
            ]
            click.echo(f"{name:<{FIELD_INDENT}}{first}")
            for line in more:
                click.echo(f"{'':<{FIELD_INDENT}}{line}")


def folded(text: str, indent: int, *, on_stderr: bool = False) -> list[str]:
    """Lines that fit a terminal beside `indent` columns; one line where nobody looks."""
    if not (is_terminal(sys.stderr) if on_stderr else stdout_is_terminal()):
        return [text]
    room = max(20, shutil.get_terminal_size().columns - indent)
    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
