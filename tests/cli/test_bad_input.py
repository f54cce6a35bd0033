"""Every option of every verb refuses what it cannot mean: exit 2, a hint, and nothing sent."""

from __future__ import annotations

import json
import os

import pytest
from tests.cli.conftest import Invoke
from tests.support.fake_daemon import FakeDaemon

NOT_UTF8 = os.fsdecode(b"\xff")

SUBMIT = [
    *(["--gpus", bad] for bad in ("-1", "x", "1.5", "", "65", "99999999999999999999", "auto1")),
    *(["--gpu-mem", bad] for bad in ("", "x", "-1G", "0", "1Q", "nan", "1e3", "9" * 30)),
    *(["--sm", bad] for bad in ("", "0", "101", "-5%", "half", "30%%", "²")),
    *(["--cores", bad] for bad in ("", "0", "-2", "two", "1.0", "4097", "٣x")),
    *(["--mem", bad] for bad in ("", "0M", "lots", "-8G", "8 G B")),
    *(["--time-limit", bad] for bad in ("", "0", "-1", "soon", "1:2:3:4", "1h30", "99999999d")),
    *(["--grace", bad] for bad in ("", "0s", "x")),
    *(["--priority", bad] for bad in ("", "x", "1001", "-1001", "--5", "1.5")),
    *(["--after", bad] for bad in ("", "0", "x", "3-1", "1-10001")),
    *(["--after-any", bad] for bad in ("0", "x")),
    ["--after", "1", "--after-any", "2"],
    *(["--name", bad] for bad in ("a\nb", "x" * 201, "\x1b[2J", NOT_UTF8)),
    *(["--env", bad] for bad in ("", "=x", "SURELY_NOT_SET_HERE", f"A={NOT_UTF8}")),
    *(["--cwd", bad] for bad in ("/no/such/folder", "/etc/passwd", NOT_UTF8)),
    *(["--log", bad] for bad in ("/no/such/folder/x.log", "/tmp", NOT_UTF8)),
    *(["--log-max", bad] for bad in ("", "0", "big")),
    *(["--array", bad] for bad in ("", "x", "3-1", "0-100000", "1-", "-1", "1,,2")),
    ["--gpus", "0", "--gpu-mem", "2G"],
    ["--gpus", "0", "--sm", "30%"],
    ["--no-such-option"],
    ["--cores"],
]

COMMANDS = [
    [],
    ["--"],
    [""],
    ["--", "surely-no-such-program"],
    ["--", "/no/such/program"],
    ["--", "/etc/passwd"],
    ["--", "/tmp"],
    ["--", "true", "a\0b"],
    ["--", "true", NOT_UTF8],
    ["--lr", "3", "true"],
    ["--hold", "sac", "--env", "Pendulum-v1"],
]

NOT_ENOUGH: list[list[str]] = [[], ["--env", "Pendulum-v1"], ["--steps", "100"]]

SAC = [
    *NOT_ENOUGH,
    *(["--algo", bad] for bad in ("", "ppo", "SB3")),
    *(["--steps", bad] for bad in ("", "0", "-1", "x", "1.5", "1e99", "9" * 40)),
    *(["--seeds", bad] for bad in ("", "x", "3-1", "99999999999", "0-100000")),
    *(["--device", bad] for bad in ("", "gpu", "cuda:0")),
    *(["--n-envs", bad] for bad in ("", "0", "x", "1025")),
    *(["--set", bad] for bad in ("", "x", "=3", "lr=")),
    *(["--eval-freq", bad] for bad in ("", "-1", "x")),
    *(["--checkpoint-freq", bad] for bad in ("", "-1", "x")),
    *(["--eval-episodes", bad] for bad in ("", "0", "x")),
    *(["--cores", bad] for bad in ("0", "x")),
    ["--env", NOT_UTF8],
    ["surplus"],
]

OTHERS = [
    ["no-such-verb"],
    ["lits"],
    ["--no-such-option"],
    ["--socket"],
    ["--socket", "", "list"],
    ["list", "--socket", ""],
    *(["list", "--state", bad] for bad in ("", "runing", "PENDING,", "1")),
    *(["list", "--limit", bad] for bad in ("", "-1", "x", "1.5")),
    *(["list", "--user", bad] for bad in ("", "no-such-user-here", str(2**32), "a\0b")),
    *(["list", bad] for bad in ("x", "0", "3-1", "1-2-3", "9" * 30, "1;2")),
    ["list", "--name", ""],
    *(["history", "--before", bad] for bad in ("", "0", "x", "1-2")),
    ["history", "--state", "RUNNING"],
    ["history", "--limit", "x"],
    *([verb] for verb in ("show", "logs", "why")),
    *([verb, bad] for verb in ("show", "logs", "why") for bad in ("x", "0", "1-2", "-1", "")),
    ["logs", "1", "-n", "-1"],
    ["logs", "1", "-n", "x"],
    ["logs", "1", "-f", "--json"],
    ["show", "1", "2"],
    ["update", "1"],
    *(["update", "1", "--priority", bad] for bad in ("", "x", "1001", "--all")),
    ["update", "--priority", "1"],
    *(
        [verb, *bad]
        for verb in ("cancel", "hold", "release", "pause", "resume", "requeue", "wait")
        for bad in (
            [],
            ["x"],
            ["0"],
            ["3-1"],
            ["--all", "3"],
            ["--state", "x"],
            ["--name", ""],
            ["--bad"],
        )
    ),
    *(["wait", "1", "--timeout", bad] for bad in ("", "0", "x")),
    ["cancel", "--all"],  # nobody can be asked
    ["requeue", "--all"],
    ["drain", "x"],
    ["gpus", "x"],
    ["profile", "x", "y"],
    ["profile", "x", "--forget", "y"],
    *(["calibrate", "--algo", bad] for bad in ("", "ppo")),
    *(["calibrate", "--device", bad] for bad in ("", "gpu")),
    *(["calibrate", "--jobs-max", bad] for bad in ("", "0", "x")),
    *(["calibrate", "--seconds", bad] for bad in ("", "0", "0.5", "x")),
    ["calibrate", "--set", "x"],
    ["calibrate", "x"],
    ["status", "x"],
    ["doctor", "x"],
    ["daemon", "restart"],
    ["daemon", "start", "x"],
    ["completion", "csh"],
    ["completion", "bash", "zsh"],
]


def assert_refused(
    daemon: FakeDaemon, invoke: Invoke, args: list[str], about: list[str] | None = None
) -> None:
    """`about`: the option and its value, one of which the message has to name."""
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    errors, hints = [], []
    for line in result.stderr.splitlines():
        errors += [line] if line.startswith("error: ") else []
        hints += [line] if line.startswith("hint: ") and len(line) > len("hint: ") else []
    assert len(errors) == 1, result.stderr
    assert len(hints) == 1, result.stderr
    assert "Traceback" not in result.output
    named = [word.lstrip("-").replace("_", "-") for word in about or [] if word.lstrip("-")]
    said = result.stderr.lower().replace("_", "-").replace(" ", "-")
    assert not named or any(word.lower().replace(" ", "-") in said for word in named)
    if "--json" in args:
        assert "error" in json.loads(result.stdout)
    else:
        assert result.stdout == ""
    assert daemon.requests == []


@pytest.mark.parametrize("options", SUBMIT, ids=repr)
def test_submit_refuses_a_wrong_option(
    daemon: FakeDaemon, invoke: Invoke, options: list[str]
) -> None:
    assert_refused(daemon, invoke, ["submit", *options, "--", "true"], about=options[-2:])


@pytest.mark.parametrize("command", COMMANDS, ids=repr)
def test_submit_refuses_what_cannot_be_run(
    daemon: FakeDaemon, invoke: Invoke, command: list[str]
) -> None:
    assert_refused(daemon, invoke, ["submit", *command])


@pytest.mark.parametrize("options", SAC, ids=repr)
def test_submit_sac_refuses_a_wrong_option(
    daemon: FakeDaemon, invoke: Invoke, options: list[str]
) -> None:
    about = None
    if options not in NOT_ENOUGH:
        about = options[-2:]
        good = {"--env": "Pendulum-v1", "--steps": "100"}
        good = {name: value for name, value in good.items() if name not in options}
        options = [*(word for pair in good.items() for word in pair), *options]
    assert_refused(daemon, invoke, ["submit", "sac", *options], about=about)


@pytest.mark.parametrize("args", OTHERS, ids=repr)
def test_every_verb_refuses_a_wrong_word(
    daemon: FakeDaemon, invoke: Invoke, args: list[str]
) -> None:
    assert_refused(daemon, invoke, args)
