"""The command `mm completion`: prints what makes a shell complete verbs and options."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import get_completion_class

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.requests.look import CompletionRequest

EXAMPLES = """
\b
Examples:
  mm completion bash >> ~/.bashrc
  mm completion fish > ~/.config/fish/completions/mm.fish
  mm completion zsh --json
"""


@click.command(epilog=EXAMPLES)
@takes(CompletionRequest)
def command(request: CompletionRequest) -> None:
    """Print what makes SHELL complete the verbs and options of mm; add it to what the shell reads at its start."""
    from mindspeed_mm.cli.main import cli  # which imports this module

    kind: Any = get_completion_class(request.shell)
    source = kind(cli, {}, "mm", "_MM_COMPLETE").source()
    if request.as_json:
        say_json({"shell": request.shell, "source": source})
    else:
        say(source)
