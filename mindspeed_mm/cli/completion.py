"""The command `mm completion`: prints what makes a shell complete verbs and options."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import get_completion_class

from mindspeed_mm.core.terminal import say, say_json

EXAMPLES = """
\b
Examples:
  mm completion bash >> ~/.bashrc
  mm completion fish > ~/.config/fish/completions/mm.fish
  mm completion zsh --json
"""


@click.command(epilog=EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def command(shell: str, as_json: bool) -> None:
    """Print what makes SHELL complete the verbs and options of mm; add it to what the shell reads at its start."""
    from mindspeed_mm.cli.main import cli  # which imports this module

    kind: Any = get_completion_class(shell)
    source = kind(cli, {}, "mm", "_MM_COMPLETE").source()
    if as_json:
        say_json({"shell": shell, "source": source})
    else:
        say(source)
