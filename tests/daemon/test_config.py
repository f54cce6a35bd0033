"""The configuration file: what it may say, and what is said about a mistake in it."""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlq.errors import UsageError
from rlqd import config
from rlqd.config import Config

REPOSITORY = Path(__file__).parents[2]
ALL_KEYS = [
    (section, key.name)
    for section, table in config.SECTIONS.items()
    for _, key in config.keys_of(table)
]


def read(text: str) -> Config:
    return config.parse(text, "rlqd.toml")


def refusal(text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read(text)
    return caught.value


def test_no_file_and_an_empty_file_are_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").touch()
    assert config.load(None) == config.load(tmp_path / "empty.toml") == Config()


def test_the_defaults_are_these() -> None:
    found = Config()
    assert (found.defaults.gpu_mem_mib, found.defaults.sm_pct, found.defaults.cores) == (
        4096,
        20,
        1,
    )
    assert (found.defaults.mem_mib, found.defaults.grace_ms) == (2048, 30_000)
    assert found.defaults.time_limit_ms is None
    assert found.defaults.log_mib_max is None
    assert (found.gpu.mem_mib_reserve, found.gpu.sm_pct_limit, found.gpu.include) == (512, 100, ())
    assert (found.cpu.reserve, found.cpu.outside, found.cpu.smt) == (0, "subtract", True)
    assert found.memory.mib_reserve == 1024
    assert found.scheduling.reserve_after_ms == 60_000
    assert (found.scheduling.settle_ms, found.scheduling.margin_pct) == (10_000, 10)
    assert found.monitor.period_ms == 1000
    assert (found.daemon.keep_finished_ms, found.daemon.message_mib_max) == (None, 64)


def test_values_are_read_in_their_units() -> None:
    found = read(
        """
        [defaults]
        mem = 300
        gpu_mem = "1.5G"
        time_limit = "2h30m"
        sm = "35%"
        [gpu]
        mem_reserve = "0"
        include = [0, "1", "GPU-5a"]
        [cpu]
        include = "0-3,8"
        smt = false
        [scheduling]
        reserve_after = "0s"
        margin = "0%"
        [environment]
        WANDB_MODE = "offline"
        """
    )
    assert (found.defaults.mem_mib, found.defaults.gpu_mem_mib) == (300, 1536)
    assert (found.defaults.time_limit_ms, found.defaults.sm_pct) == (9_000_000, 35)
    assert found.gpu.mem_mib_reserve == 0
    assert found.gpu.include == ("0", "1", "GPU-5a")
    assert found.cpu.include == (0, 1, 2, 3, 8)
    assert found.cpu.smt is False
    assert (found.scheduling.reserve_after_ms, found.scheduling.margin_pct) == (0, 0)
    assert found.environment == {"WANDB_MODE": "offline"}


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[gpu]\nmem_reserv = 1", "unknown key gpu.mem_reserv", "gpu.mem_reserve?"),
        ("[gpu]\nlog_level = 1", "unknown key gpu.log_level", "daemon.log_level?"),
        ("[memory]\nxyzzy = 1", "unknown key memory.xyzzy", "[memory] has reserve"),
        ("[sheduling]\n", "unknown section [sheduling]", "[scheduling]?"),
        ("[xyzzy]\n", "unknown section [xyzzy]", "sections: defaults"),
        ("log_level = 'info'", "log_level stands in no section", "daemon.log_level?"),
        ("xyzzy = 1", "xyzzy stands in no section", "--print-config"),
        ("gpu = 1", "gpu is a section", "[gpu]"),
        ("[[gpu]]\n", "gpu is a section", "[gpu]"),
        ("[limits]\nmax_job = 1", "unknown key limits.max_job", "limits.max_jobs?"),
        ("[limits.user.alice]\ngpus = 1", "unknown key limits.user", "limits.users?"),
        (
            "[limits.users.alice]\nmax_job = 1",
            "unknown key limits.users.alice.max_job",
            "limits.users.alice.max_jobs?",
        ),
        ("[limits]\nusers = 3", "limits.users is a section", "[limits.users.NAME]"),
        ("[limits.users]\nalice = 3", "limits.users.alice is a section", "[limits.users.alice]"),
    ],
)
def test_an_unknown_name_gets_the_nearest_that_exists(text: str, message: str, hint: str) -> None:
    error = refusal(text)
    assert "rlqd.toml" in error.message
    assert message in error.message
    assert hint in (error.hint or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[defaults]\ncores = 0", "defaults.cores is 0, and must be a whole number from 1"),
        ("[defaults]\ncores = true", "defaults.cores is true, and must be a whole number"),
        ("[defaults]\ncores = 1.5", "defaults.cores is 1.5"),
        ("[defaults]\nsm = '101%'", 'defaults.sm is "101%", and must be a share from "1%"'),
        ("[defaults]\nsm = '0%'", "defaults.sm"),
        ("[defaults]\nsm = 20", "defaults.sm is 20"),
        ("[defaults]\nmem = -1", "defaults.mem is -1"),
        ("[defaults]\nmem = 'much'", "must be a size such as"),
        ("[defaults]\nmem = '0'", "defaults.mem"),
        ("[defaults]\nmem = true", "defaults.mem is true"),
        ("[defaults]\ngrace = 30", "defaults.grace is 30, and must be a duration"),
        ("[defaults]\ngrace = '2d'", "0s to 1d"),
        ("[monitor]\nperiod = '1ms'", "monitor.period"),
        ("[daemon]\nmax_message = '65M'", "1 MiB to 64 MiB"),
        ("[daemon]\nlog_level = 'loud'", 'one of "debug", "info"'),
        ("[cpu]\nsmt = 1", "cpu.smt is 1, and must be true or false"),
        ("[cpu]\ninclude = '4-1'", "cpu.include"),
        ("[cpu]\ninclude = '0-99999999999'", "cpu.include"),
        ("[gpu]\ninclude = 0", "gpu.include is 0, and must be a list"),
        ("[gpu]\ninclude = ['cuda:0']", "gpu.include"),
        ("[gpu]\ninclude = [true]", "gpu.include"),
        ("[limits]\nmax_jobs = -1", 'limits.max_jobs is -1, and must be "" (none) or a whole'),
        ("[limits.users.alice]\ngpu_mem = 'x'", "limits.users.alice.gpu_mem"),
    ],
)
def test_a_value_that_is_not_allowed_is_named_with_what_is(text: str, message: str) -> None:
    error = refusal(text)
    assert message in error.message
    assert "the default is" in (error.hint or "")


@pytest.mark.parametrize(
    "text", ["[gpu", "a = 2020-13-45", "x = " + "[" * 5000, "x = " + "9" * 5000, "a=1\na=2"]
)
def test_what_is_not_toml_is_said_to_be_so(text: str) -> None:
    assert "rlqd.toml is not valid TOML" in refusal(text).message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml"):
        config.load(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a text file"):
        config.load(tmp_path / "binary.toml")


@pytest.mark.parametrize("line", ["A = 1", 'A = "x\\u0000"', '"a=b" = "x"', '"" = "x"'])
def test_environment_takes_what_an_environment_can_hold(line: str) -> None:
    assert "rlqd.toml" in refusal(f"[environment]\n{line}").message


def test_values_of_the_environment_are_in_no_repr_and_no_error() -> None:
    assert "hunter2" not in repr(read('[environment]\nTOKEN = "hunter2"'))
    error = refusal('[environment]\nTOKEN = "hunter2\\u0000"')
    assert "hunter2" not in error.message + str(error.hint)


def test_every_section_is_a_field_of_config() -> None:
    assert [one.name for one in fields(Config)] == [*config.SECTIONS, config.ENVIRONMENT]


def test_describe_shows_every_key_and_reads_back() -> None:
    document = tomllib.loads(config.describe())
    assert [(s, k) for s in config.SECTIONS for k in document[s]] == ALL_KEYS
    assert read(config.describe()) == Config()


def test_a_users_limits_start_from_everybodys_and_a_groups_from_none() -> None:
    found = read(
        """
        [limits]
        max_jobs = 8
        gpus = 2
        [limits.users.alice]
        gpus = 4
        [limits.users.root]
        max_jobs = ""
        [limits.groups."phd students"]
        gpu_mem = "80G"
        """
    ).limits
    assert (found.max_jobs, found.gpus, found.cores) == (8, 2, None)
    assert (found.users["alice"].max_jobs, found.users["alice"].gpus) == (8, 4)
    assert (found.users["root"].max_jobs, found.users["root"].gpus) == (None, 2)
    students = found.groups["phd students"]
    assert (students.gpu_mem_mib, students.max_jobs, students.gpus) == (81_920, None, None)


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1), st.text()))
def test_describe_of_any_environment_reads_back(environment: dict[str, str]) -> None:
    legal = {
        name: value
        for name, value in environment.items()
        if "=" not in name and "\0" not in name + value
    }
    changed = replace(Config(), environment=legal)
    assert read(config.describe(changed)) == changed


def test_describe_of_a_changed_configuration_reads_back() -> None:
    changed = read(
        '[defaults]\ntime_limit = "90s"\nlog_max = 300\ngrace="150ms"\nmem="3G"\n'
        '[cpu]\ninclude = "1-3,7"\nsmt = false\n[gpu]\ninclude = [2, "GPU-a"]\n'
        '[daemon]\nkeep_finished = "90d"\n[memory]\nreserve = 0\n'
        '[limits]\ncores = 8\n[limits.users.alice]\ngpu_mem = "4G"\n'
        '[limits.groups."a.b"]\ngpus = 0\n'
    )
    assert read(config.describe(changed)) == changed


def test_the_documentation_holds_exactly_these_tables() -> None:
    page = (REPOSITORY / "docs/configuration.md").read_text()
    assert config.markdown() in page, "paste the output of `python -m rlqd.config` into it"
    for section, key in ALL_KEYS:
        assert f"| `{key}` |" in page.split(f"### `[{section}]`")[1].split("###")[0]


def test_the_example_in_the_documentation_is_valid() -> None:
    page = (REPOSITORY / "docs/configuration.md").read_text()
    example = page.split("```toml\n")[1].split("```")[0]
    found = read(example)
    assert (found.gpu.mem_mib_reserve, found.cpu.reserve) == (1024, 2)
