"""Keys, hosts, and who is asked: `rlq key`, --host, RLQ_HOST.  The daemon: tests/daemon."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from tests.support.fake_daemon import FakeDaemon

from rlq import remote, specs
from rlq.client import Client
from rlq.errors import UnreachableError, UsageError
from rlq.protocol import keys
from rlq.protocol import messages as m

Invoke = Callable[..., Result]
KEY = "a" * 52
OTHER = "b" * 51 + "a"


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("RLQ_HOST", raising=False)
    return tmp_path / "rlq"


# ---- as keys are written -----------------------------------------------------------


def test_a_key_reads_back_and_a_slip_in_it_is_noticed() -> None:
    key = bytes(range(32))
    shown = keys.show_key(key)
    assert keys.parse_key(f" {shown}\n") == key
    assert keys.parse_secret(keys.show_secret(key) + "\n") == key
    wrong = [
        shown[:-1],
        shown + "a",
        shown.upper(),
        "0" + shown[1:],
        shown[:-1] + "z",
        "",
        "ä" * 52,
    ]
    for text in wrong:
        with pytest.raises(UsageError, match="is not a public key"):
            keys.parse_key(text)


def test_a_secret_key_is_never_taken_for_a_public_one_nor_shown() -> None:
    secret = keys.show_secret(bytes(32))
    with pytest.raises(UsageError, match="this is a secret key") as refused:
        keys.parse_key(secret)
    assert secret not in f"{refused.value.message}{refused.value.hint}"
    with pytest.raises(UsageError) as refused:
        keys.parse_secret(secret + "x")
    assert secret not in f"{refused.value.message}{refused.value.hint}"
    made = remote.Remote("h", 1, b"", b"", b"hidden")
    assert "hidden" not in repr(made)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("lab-gpu1", "lab-gpu1", 7757),
        ("Lab-GPU1.uni.example:9", "lab-gpu1.uni.example", 9),
        ("10.0.0.5:65535", "10.0.0.5", 65535),
        ("[fe80::1]:9", "fe80::1", 9),
        ("fe80::1", "fe80::1", 7757),
    ],
)
def test_a_host_is_a_name_or_an_address_and_a_port(text: str, host: str, port: int) -> None:
    assert remote.parse_host(text) == (host, port)
    assert remote.parse_host(remote.show_host(host, port)) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a b",
        "lab:",
        "lab:0",
        "lab:65536",
        "lab:x",
        "-oProxy=x",
        "tcp://lab",
        "lab\n",
        "ä",
        ":9",
    ],
)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        remote.parse_host(text)


# ---- rlq key -----------------------------------------------------------------------


def test_a_key_is_made_once_and_its_file_is_ones_own(invoke: Invoke, config: Path) -> None:
    before = os.umask(0)
    try:
        made = invoke("key")
    finally:
        os.umask(before)
    public = made.stdout.strip()
    assert keys.parse_key(public)
    assert f"rlq key enrol {remote_user()} {public}\n" in made.stderr
    assert all(len(line) <= 80 for line in made.output.splitlines() if str(config) not in line)
    assert (config / "key").stat().st_mode & 0o777 == 0o600
    assert config.stat().st_mode & 0o077 == 0
    text = (config / "key").read_text()
    assert text.strip() not in made.output
    again = invoke("key", "--json")
    told = json.loads(again.stdout)
    assert (told["public_key"], told["made"]) == (public, False)
    assert (config / "key").read_text() == text
    assert invoke("key", "--force").stdout.strip() != public
    assert (config / "key").read_text() != text
    assert [entry.name for entry in config.iterdir()] == ["key"]


def remote_user() -> str:
    import getpass

    return getpass.getuser()


def test_a_key_that_others_can_read_is_not_used(invoke: Invoke, config: Path) -> None:
    invoke("key")
    (config / "key").chmod(0o644)
    refused = invoke("key")
    assert refused.exit_code == 2
    assert "others may read your secret key" in refused.stderr
    assert f"hint: chmod 600 {config / 'key'}" in refused.stderr


def test_enrolling_and_revoking_are_asked_of_the_daemon(
    daemon: FakeDaemon, invoke: Invoke
) -> None:
    assert invoke("key", "enrol", "ada", KEY).exit_code == 0
    assert invoke("key", "revoke", KEY).exit_code == 0
    assert invoke("key", "revoke", "ada").exit_code == 0
    asked = [one for one in daemon.requests if not isinstance(one, m.ListKeys)]
    assert asked == [
        m.EnrolKey(user="ada", key=KEY),
        m.RevokeKey(key=KEY),
        m.RevokeKey(user="ada"),
    ]
    for words in (("enrol", "ada", KEY[1:]), ("enrol", "ada", "SECRET-" + KEY)):
        assert invoke("key", *words).exit_code == 2
    assert len(daemon.requests) == 4


def test_a_server_is_known_by_what_was_said_and_never_by_another_key_in_silence(
    invoke: Invoke, config: Path
) -> None:
    assert invoke("key", "trust", "lab-gpu1", KEY).exit_code == 0
    assert invoke("key", "trust", "lab-gpu2:99", OTHER).exit_code == 0
    assert invoke("key", "trust", "lab-gpu1", KEY).stdout == "lab-gpu1 was known already\n"
    refused = invoke("key", "trust", "lab-gpu1", OTHER)
    assert refused.exit_code == 2
    assert f"known by another key: {KEY}" in refused.stderr
    known = {("lab-gpu1", 7757): keys.parse_key(KEY), ("lab-gpu2", 99): keys.parse_key(OTHER)}
    assert remote.known_hosts() == known
    assert invoke("key", "trust", "lab-gpu1", OTHER, "--force").exit_code == 0
    assert remote.known_hosts()["lab-gpu1", 7757] == keys.parse_key(OTHER)
    (config / "known_hosts").write_text(f"# mine\n\nlab {KEY}\nlab2 x\n")
    with pytest.raises(UsageError, match="known_hosts, line 4"):
        remote.known_hosts()


# ---- who is asked ------------------------------------------------------------------


def test_what_is_said_nearest_counts(
    daemon: FakeDaemon, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLQ_HOST", "lab-gpu1")
    # RLQ_SOCKET is set: a job finds its own queue, whatever it inherited.
    assert invoke("list").exit_code == 0
    for words in (("--host", "lab-gpu1", "list"), ("list", "--host", "lab-gpu1")):
        refused = invoke(*words)
        assert refused.exit_code == 2
        assert "the key of lab-gpu1 is not known" in refused.stderr
    monkeypatch.delenv("RLQ_SOCKET")
    assert "the key of lab-gpu1 is not known" in invoke("list").stderr
    assert invoke("list", "--socket", str(daemon.path)).exit_code == 0
    both = invoke("list", "--socket", str(daemon.path), "--host", "lab-gpu1")
    assert "--socket is a daemon on this machine, --host one on another" in both.stderr


def test_a_machine_that_is_not_there_is_told_with_its_likely_causes(invoke: Invoke) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        host = f"127.0.0.1:{taken.getsockname()[1]}"
        invoke("key")
        invoke("key", "trust", host, KEY)
        with Client(host=host) as client, pytest.raises(UnreachableError) as refused:
            client.ping()
    assert "Connection refused" in refused.value.message
    for cause in ("no rlqd runs there", "a firewall", "the host or the port is another"):
        assert cause in str(refused.value.hint)


def test_without_a_key_of_ones_own_it_is_said_how_to_make_one() -> None:
    remote.trust("lab-gpu1", keys.parse_key(KEY))
    with Client(host="lab-gpu1") as client, pytest.raises(UsageError) as refused:
        client.ping()
    assert "`rlq key` makes one" in str(refused.value.hint)


def test_the_paths_of_a_job_elsewhere_are_that_machines() -> None:
    def spec(cwd: str | None = None, log: str | None = None) -> m.JobSpec:
        resources = specs.make_resources(gpu_mem="1G")
        return specs.make_spec(["./train"], resources=resources, remote=True, cwd=cwd, log=log)

    assert spec().cwd == "~"
    assert (spec(cwd="runs/a").cwd, spec(cwd="~/b/").cwd) == ("~/runs/a", "~/b")
    there = spec(cwd="/no/such", log="logs/%j.log")
    assert (there.cwd, there.log_path) == ("/no/such", "/no/such/logs/%j.log")
    assert spec(cwd="runs", log="/x/y").log_path == "/x/y"
