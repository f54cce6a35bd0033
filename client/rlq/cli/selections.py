"""Which jobs a verb is about: ids, ranges, --name, --state, --all, --user."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rlq.cli.app import Parsed, is_terminal, note
from rlq.cli.complete import complete_ids, complete_states, complete_users
from rlq.errors import NotFoundError, UsageError
from rlq.protocol.states import FINAL_STATES, LIVE_STATES, JobState
from rlq.protocol.units import parse_ranges

if TYPE_CHECKING:
    from rlq.client import Client
    from rlq.protocol.messages import Selection

F = TypeVar("F", bound=Callable[..., Any])


def parse_id(text: str) -> int:
    ranges = parse_ranges(text)
    if len(ranges) != 1 or ranges[0][0] != ranges[0][1]:
        raise UsageError(f"{text!r} is not one job", hint="give the id of one job, such as 3")
    if ranges[0][0] == 0:
        raise UsageError("there is no job 0", hint="ids start at 1")
    return ranges[0][0]


def parse_states(text: str) -> tuple[JobState, ...]:
    """'running', 'RUNNING,PENDING', 'live', 'ended', and what tables say: 'starting'.

    Raises:
        UsageError: not a state.
    """
    from rlq.cli.tables import HELD, STATES_SHOWN

    states: list[JobState] = []
    for word in text.split(","):
        upper = word.strip().upper()
        upper = STATES_SHOWN.get(upper.replace("_", " ").replace("-", " "), upper)
        if upper == "LIVE":
            states += sorted(LIVE_STATES)
        elif upper in {"ENDED", "FINAL"}:
            states += sorted(FINAL_STATES)
        elif upper in JobState.__members__:
            states.append(JobState(upper))
        elif upper == HELD:
            # The protocol knows it as PENDING and a mark: as PENDING alone it would be more jobs.
            raise UsageError(
                "held is not a state that jobs can be chosen by here",
                hint="`rlq list --state HELD` shows the held jobs: give their ids",
            )
        else:
            from difflib import get_close_matches

            near = get_close_matches(upper, [*JobState.__members__, *STATES_SHOWN], n=1)
            raise UsageError(
                f"{word.strip()!r} is not a state",
                hint=f"did you mean {near[0]}?"
                if near
                else f"one of {', '.join(JobState)}, live or ended",
            )
    return tuple(dict.fromkeys(states))


def parse_listed_states(text: str) -> tuple[JobState | str, ...]:
    """As `parse_states`, and HELD as itself."""
    from rlq.cli.tables import HELD

    words = text.split(",")
    others = [word for word in words if word.strip().upper() != HELD]
    held = (HELD,) if len(others) < len(words) else ()
    return (*(parse_states(",".join(others)) if others else ()), *held)


def id_argument(function: F) -> F:
    return click.argument(
        "job", metavar="ID", type=Parsed("id", parse_id), shell_complete=complete_ids
    )(function)


def name_option(function: F) -> F:
    return click.option(
        "--name", metavar="PATTERN", help="Jobs whose name matches a shell pattern: 'sac-*'."
    )(function)


def state_option(function: F, parse: Callable[[str], Any] = parse_states) -> F:
    return click.option(
        "--state",
        "states",
        metavar="STATE",
        multiple=True,
        type=Parsed("state", parse),
        shell_complete=complete_states,
        help="Jobs in this state (PENDING, RUNNING, …; live, ended); repeatable.",
    )(function)


def listed_state_option(function: F) -> F:
    return state_option(function, parse_listed_states)


def user_option(function: F) -> F:
    return click.option(
        "--user",
        "uid",
        metavar="USER",
        type=Parsed("user", parse_user),
        shell_complete=complete_users,
        help="Jobs of this user (a name, a number, or `me`).",
    )(function)


def ids_argument(function: F) -> F:
    return click.argument(
        "ids",
        metavar="[ID|FROM-TO]...",
        nargs=-1,
        type=Parsed("ids", parse_ranges),
        shell_complete=complete_ids,
    )(function)


def selection_options(function: F) -> F:
    """ids, --name, --state, --user, --all: of a verb that acts on jobs."""
    function = click.option("--all", "all_", is_flag=True, help="All your jobs.")(function)
    function = click.option(
        "--all-users",
        "everybody",
        is_flag=True,
        help="Everybody's jobs, not yours alone (administrators).",
    )(function)
    return ids_argument(name_option(state_option(user_option(function))))


def yes_option(function: F) -> F:
    return click.option("--yes", "-y", is_flag=True, help="Do not ask before --all.")(function)


def parse_user(text: str) -> int:
    import os
    import pwd

    if text == "me":
        return os.getuid()
    if text.isascii() and text.isdigit():
        uid = int(text)
        if uid >= 2**32:
            raise UsageError(f"{text} is not a user id", hint="give a login name, or `me`")
        return uid
    try:
        return pwd.getpwnam(text).pw_uid
    except (KeyError, ValueError, UnicodeError):
        raise UsageError(
            f"there is no user {text!r}", hint="give a login name, a number, or `me`"
        ) from None


def make_selection(
    ids: tuple[tuple[tuple[int, int], ...], ...],
    name: str | None,
    states: tuple[tuple[JobState, ...], ...],
    all_: bool,
    *,
    uid: int | None = None,
    everybody: bool = False,
    needed: bool = True,
) -> Selection:
    """The selection out of what the options gave.  Where one is `needed`, --user and --all-users
    alone mean all of their jobs.

    Raises:
        UsageError: nothing was selected (where `needed`), or two options exclude each other.
    """
    from rlq.protocol.messages import Selection

    ranges = tuple(pair for group in ids for pair in group)
    if any(low == 0 for low, _ in ranges):
        raise UsageError("there is no job 0", hint="ids start at 1")
    if all_ and ranges:
        raise UsageError("--all and ids exclude each other", hint="give one of them")
    if everybody and (ranges or uid is not None):
        other = "ids" if ranges else "--user"
        raise UsageError(f"--all-users and {other} exclude each other", hint="give one of them")
    if name == "":
        raise UsageError("--name is empty", hint="--name 'sac-*'")
    flat = tuple(dict.fromkeys(state for group in states for state in group))
    if needed and not (ranges or name or flat):
        all_ = all_ or everybody or uid is not None
    if needed and not (ranges or name or flat or all_):
        raise UsageError(
            "no job was named",
            hint="give ids (3, 3-9), --name PATTERN, --state STATE or --all",
        )
    return Selection(ids=ranges, name=name, states=flat, all=all_, uid=uid, everybody=everybody)


def resolve(client: Client, selection: Selection) -> list[int]:
    """The ids that the selection means now, ascending.

    Raises:
        NotFoundError: it means none, or an id in it does not exist.
    """
    import os

    import msgspec

    from rlq.protocol.messages import List

    if not selection.ids and selection.uid is None and not selection.everybody:
        # As for verbs that act: without ids it is about one's own.
        selection = msgspec.structs.replace(selection, uid=os.getuid())
    found = client.pages(List(selection=selection))
    if found.missing:
        raise NotFoundError(
            f"there is no job {', '.join(str(job) for job in found.missing)}",
            hint="`rlq list` shows the jobs",
        )
    if not found.jobs:
        raise NotFoundError("no job matches", hint="`rlq list` shows the jobs")
    return sorted(job.id for job in found.jobs)


def confirm_all(
    what: str,
    selection: Selection,
    client: Client,
    yes: bool,
    states: Iterable[JobState] = LIVE_STATES,
) -> None:
    """Before something that cannot be taken back is done to more than one job by --all.

    `states`: of the jobs that it would be done to.

    Raises:
        UsageError: nobody can be asked.
        Exit: the answer was no.
    """
    import os

    import msgspec

    from rlq.protocol.messages import Jobs, List

    if not selection.all or yes:
        return
    me = os.getuid()
    uid = None if selection.everybody else me if selection.uid is None else selection.uid
    if not is_terminal(sys.stdin):
        whose = "everybody's" if uid is None else "yours" if uid == me else f"uid {uid}'s"
        raise UsageError(
            f"this would {what} every job of {whose} that it applies to, and nobody can be asked"
            " here",
            hint="add --yes",
        )
    mine = msgspec.structs.replace(
        selection, uid=uid, states=selection.states or tuple(sorted(states))
    )
    found = client.request(List(selection=mine, limit=1))
    assert isinstance(found, Jobs)
    if found.total > 1 and not click.confirm(f"{what} {found.total} jobs?", err=True):
        note("nothing was done")
        raise click.exceptions.Exit(1)
