"""A job has the resource limits that its submitter's shell had, as far as the daemon may give."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rlqd.shell import rlimits

UNLIMITED = resource.RLIM_INFINITY
OWN = {
    "RLIMIT_NOFILE": (1024, 524_288),
    "RLIMIT_CORE": (0, UNLIMITED),
    "RLIMIT_NPROC": (100, 100),
}


@pytest.fixture
def limited() -> Iterator[int]:
    """The pid of a process that has fewer open files and no core dumps."""
    script = "ulimit -Sn 77; ulimit -Hn 99; ulimit -c 0; echo; read line"
    with subprocess.Popen(
        ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        yield shell.pid
        shell.communicate(b"\n")


def test_the_limits_are_those_of_the_submitting_process(limited: int) -> None:
    found = rlimits.of_process(limited, os.geteuid())
    assert found is not None
    assert found["RLIMIT_NOFILE"] == (77, 99)
    assert found["RLIMIT_CORE"] == (0, 0)
    assert found.keys() == rlimits.of_this_process().keys() == set(rlimits.NAMES)


def test_a_process_that_is_gone_or_anothers_is_not_one_without_limits(limited: int) -> None:
    assert rlimits.of_process(limited, os.geteuid() + 1) is None
    assert rlimits.of_process(2**22 + 1, os.geteuid()) is None


def test_of_what_the_kernel_does_not_name_there_are_none() -> None:
    assert rlimits.of_process(0, os.geteuid()) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have two users")
def test_a_process_that_could_be_somebody_else_again_is_not_its_users_alone() -> None:
    """As a set-user-ID program: the user at the moment, with limits that root may have raised."""
    script = "import os; os.setreuid(0, 4_000_000); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        program.stdout.readline()
        assert rlimits.of_process(program.pid, 4_000_000) is None
        program.communicate(b"\n")


def test_only_what_differs_from_the_daemons_own_is_kept() -> None:
    theirs = {**OWN, "RLIMIT_CORE": (0, 0)}
    assert rlimits.to_keep(theirs, OWN) == {"RLIMIT_CORE": (0, 0)}


def test_a_job_gets_the_submitters_limits_and_never_more_than_the_daemon_may_give() -> None:
    kept = {
        "RLIMIT_NOFILE": (1_000_000, UNLIMITED),
        "RLIMIT_CORE": (UNLIMITED, UNLIMITED),
        "RLIMIT_NPROC": (50, 60),
        "RLIMIT_NOPE": (1, 1),
    }
    assert rlimits.of_job(kept, OWN) == {
        "RLIMIT_NOFILE": (524_288, 524_288),
        "RLIMIT_CORE": (UNLIMITED, UNLIMITED),
        "RLIMIT_NPROC": (50, 60),
    }


def test_without_a_word_of_the_submitter_it_gets_the_daemons_as_it_was_started() -> None:
    assert rlimits.of_job({}, OWN) == {"RLIMIT_NOFILE": (1024, 524_288)}
