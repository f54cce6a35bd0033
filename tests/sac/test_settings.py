"""The command line of the workload: what it takes and what it says to the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from rlq.errors import UsageError
from rlq_sac.settings import KEYWORDS, NOT_KEYWORDS, POLICY_KEYWORDS, parse_keywords, parse_steps


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("1", 1),
        ("700000", 700_000),
        ("700_000", 700_000),
        ("7e5", 700_000),
        ("7E+5", 700_000),
        ("700k", 700_000),
        ("1.5M", 1_500_000),
        ("0.001k", 1),
        (" 2e3 ", 2000),
        ("1e12", 10**12),
    ],
)
def test_steps_are_written_in_many_ways(text: str, steps: int) -> None:
    parsed = parse_steps(text)
    assert parsed == steps
    assert type(parsed) is int


@pytest.mark.parametrize(
    "text",
    ["", "0", "-5", "1.5", "1e-3", "nan", "inf", "7e99", "1e13", "k", "1kk", "0x10", "٣", "1 k"],
)
def test_what_is_no_whole_number_of_steps_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="steps"):
        parse_steps(text)


def test_keywords_are_python_literals_checked_and_typed() -> None:
    keywords = parse_keywords(
        "sb3",
        1,
        [
            "learning_starts=1e3",
            "learning_rate=1e-3",
            "tau=1",
            "ent_coef=auto_0.1",
            "policy_kwargs.net_arch=[256, 256]",
            "policy_kwargs.activation_fn=tanh",
            "train_freq=(1, 'episode')",
            "use_sde=True",
            "learning_starts=2000",
        ],
    )
    assert keywords == {
        "learning_starts": 2000,
        "learning_rate": 1e-3,
        "tau": 1.0,
        "ent_coef": "auto_0.1",
        "policy_kwargs": {"net_arch": [256, 256], "activation_fn": "tanh"},
        "train_freq": (1, "episode"),
        "use_sde": True,
    }
    assert type(keywords["learning_starts"]) is int
    assert type(keywords["tau"]) is float


@pytest.mark.parametrize(
    ("algo", "pair", "hint"),
    [
        ("sb3", "learning_start=5", "did you mean learning_starts?"),
        ("sb3", "policy_kwargs.netarch=[1]", "did you mean policy_kwargs.net_arch?"),
        ("sb3", "policy_kwargs={'n_critic': 2}", "did you mean policy_kwargs.n_critics?"),
        ("sb3", "xyzzy=5", "there are batch_size"),
        ("sb3", "policy_delay=2", "use --algo sbx"),
        ("sbx", "optimize_memory_usage=True", "use --algo sb3"),
        ("sb3", "policy_kwargs.layer_norm=True", "use --algo sbx"),
        ("sb3", "seed=3", "options of their own"),
        ("sb3", "batch_size=0", "a whole number from 1"),
        ("sb3", "batch_size=1.5", "a whole number"),
        ("sb3", "batch_size=True", "a whole number"),
        ("sb3", "buffer_size=1e999", "a finite number"),
        ("sb3", "learning_rate=fast", "a number above 0"),
        ("sb3", "learning_rate=0", "a number above 0"),
        ("sb3", "gamma=1.1", "a number from 0 up to 1"),
        ("sb3", "use_sde=1", "True or False"),
        ("sb3", "ent_coef=autumn", "'auto'"),
        ("sb3", "train_freq=(1, 'day')", "(1, 'episode')"),
        ("sb3", "policy_kwargs.net_arch=256", "[256, 256]"),
        ("sb3", "policy_kwargs.net_arch={'pi': [1]}", "'qf'"),
        ("sb3", "optimize_memory_usage=True", "handle_timeout_termination=False"),
        ("sb3", "learning_starts", "learning_starts=1000"),
        ("sb3", "=5", "learning_starts=1000"),
        ("sb3", "policy_kwargs=[1]", "a dictionary"),
        ("sb3", "batch_size=" + "(" * 500, "a whole number"),
    ],
)
def test_a_bad_keyword_is_refused_with_a_hint(algo: Any, pair: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_keywords(algo, 1, [pair])
    assert refused.value.hint is not None
    assert hint in refused.value.hint


def test_several_environments_do_not_go_with_episodes() -> None:
    with pytest.raises(UsageError, match="one environment only"):
        parse_keywords("sb3", 2, ["train_freq=(1,'episode')"])


def test_optimize_memory_usage_goes_without_time_limits() -> None:
    parse_keywords(
        "sb3",
        1,
        ["optimize_memory_usage=True", "replay_buffer_kwargs.handle_timeout_termination=False"],
    )


@pytest.mark.sac
def test_the_tables_are_the_real_signatures() -> None:
    program = """
import inspect, json, sbx, stable_baselines3, sbx.sac.policies, stable_baselines3.sac.policies
names = lambda function: sorted(set(inspect.signature(function).parameters) - {"self"})
print(json.dumps({
    "sb3": [names(stable_baselines3.SAC.__init__),
            names(stable_baselines3.sac.policies.SACPolicy.__init__)],
    "sbx": [names(sbx.SAC.__init__), names(sbx.sac.policies.SACPolicy.__init__)],
}))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True, check=True
    )
    for algo, (constructor, policy) in json.loads(run.stdout).items():
        assert sorted(set(constructor) - NOT_KEYWORDS) == sorted(KEYWORDS[algo])
        assert set(POLICY_KEYWORDS[algo]) <= set(policy)


def rlq_sac(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlq_sac", *options], text=True, capture_output=True, timeout=60
    )


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--env", "Humanid-v5", "--steps", "10"], 2, "did you mean Humanoid-v5"),
        (["--env", "CartPole-v1", "--steps", "10"], 2, "continuous"),
        (["--env", "Pendulum-v1", "--steps", "ten"], 2, "write 700000, 7e5 or 700k"),
        (["--env", "Pendulum-v1", "--steps", "9", "--set", "bath_size=3"], 2, "batch_size?"),
        (["--env", "Pendulum-v1", "--steps", "9", "--n-envs", "0"], 2, "--n-envs"),
        (["--env", "Pendulum-v1", "--steps", "9", "--seed", "-1"], 2, "--seed"),
        (["--env", "Pendulum-v1", "--steps", "9", "--out", "/proc/nowhere"], 2, "/proc/nowhere"),
    ],
)
def test_a_bad_option_is_one_sentence_and_an_exit_code(
    options: list[str], code: int, words: str
) -> None:
    run = rlq_sac("train", *options)
    assert run.returncode == code, run.stderr
    assert words in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""


def test_plan_is_one_line_of_json_and_quick_to_import() -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-X",
            "importtime",
            "-m",
            "rlq_sac",
            *[
                "plan",
                "--algo",
                "sbx",
                "--env",
                "Humanoid-v4",
                "--steps",
                "1e4",
                "--device",
                "cpu",
            ],
        ],
        text=True,
        capture_output=True,
        check=True,
    )
    assert json.loads(run.stdout)["gpus"] == 0
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "gymnasium" in imported
    assert imported.isdisjoint({"torch", "jax", "stable_baselines3", "matplotlib"})
    assert "out of date" not in run.stderr
