"""What is taken for a secret, and what is not."""

from __future__ import annotations

import pytest

from rlq.cli.masking import MASK, is_secret_variable, mask_argv


@pytest.mark.parametrize(
    "argv",
    [
        ["--token", "S"],
        ["--token=S"],
        ["--api-key=S"],
        ["--api_key", "S"],
        ["--wandb.api-key=S"],
        ["-password", "S"],
        ["--db-passwd=S"],
        ["--client-secret", "S"],
        ["--aws-secret-access-key=S"],
        ["HF_TOKEN=S"],
        ["ENCRYPTION_KEY=S"],
        ["https://me:S@host/repo"],
        ["--url=https://me:S@host/repo"],
    ],
)
def test_a_secret_on_a_command_line_is_masked(argv: list[str]) -> None:
    masked = mask_argv(["python", "t.py", *argv, "--lr", "3"])
    assert "S" not in "".join(masked)
    assert MASK in "".join(masked)
    assert masked[:2] == ["python", "t.py"]
    assert masked[-2:] == ["--lr", "3"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--max-tokens", "512"],
        ["--tokenizer=gpt2"],
        ["--sort-key", "name"],
        ["--key=value"],
        ["model.key=5"],
        ["--token", "--lr", "3"],
        ["http://host:8080/a@b"],
        ["a=b=c"],
        [""],
    ],
)
def test_what_only_looks_a_little_like_one_is_shown(argv: list[str]) -> None:
    assert mask_argv(argv) == argv


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("WANDB_API_KEY", True),
        ("github_token", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", True),
        ("PGPASSWORD", True),
        ("PATH", False),
        ("OMP_NUM_THREADS", False),
    ],
)
def test_variables_are_masked_by_their_names(name: str, secret: bool) -> None:
    assert is_secret_variable(name) is secret
