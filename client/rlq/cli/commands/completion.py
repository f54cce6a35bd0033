"""Completion for the shell: verbs, options, ids of jobs, states."""

from __future__ import annotations

import os
import sys

import click
from click.shell_completion import get_completion_class

from rlq.cli.app import App, is_terminal, note, verb
from rlq.cli.output import print_json
from rlq.errors import UsageError

SHELLS = ("bash", "zsh", "fish")
WHERE = {
    "bash": "rlq completion bash > ~/.rlq.bash && echo '. ~/.rlq.bash' >> ~/.bashrc",
    "zsh": "rlq completion zsh > ~/.rlq.zsh; echo '. ~/.rlq.zsh' >> ~/.zshrc",
    "fish": "rlq completion fish > ~/.config/fish/completions/rlq.fish",
}


@verb("completion", short_help="Completion for your shell.")
@click.argument("shell", metavar="[bash|zsh|fish]", required=False)
def command(app: App, shell: str | None) -> None:
    """Print the completion script of a shell (default: yours, by $SHELL).

    \b
    rlq completion bash > ~/.rlq.bash   (and source it in ~/.bashrc)
    rlq completion fish > ~/.config/fish/completions/rlq.fish
    rlq completion zsh > ~/.rlq.zsh     (and source it in ~/.zshrc)
    """
    chosen = shell or os.path.basename(os.environ.get("SHELL", ""))
    if chosen not in SHELLS:
        raise UsageError(
            f"there is no completion for the shell {chosen!r}",
            hint="rlq completion bash, zsh or fish",
        )
    if shell is None and not app.json and is_terminal(sys.stdout):
        click.echo(WHERE[chosen])
        note("run this once, then open a new shell")
        return
    script = source(chosen)
    if app.json:
        print_json({"shell": chosen, "script": script})
    else:
        click.echo(script)


def source(shell: str) -> str:
    from rlq.cli import rlq

    maker = get_completion_class(shell)
    assert maker is not None
    completion = maker(rlq, {}, "rlq", "_RLQ_COMPLETE")
    # click's bash class runs bash to learn its version; the script itself needs no such thing.
    return completion.source_template % completion.source_vars()
