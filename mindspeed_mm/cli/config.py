"""The command `mm config`: shows the resolved configuration and the origin of each value."""

from __future__ import annotations

import os

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks import config as task
from mindspeed_mm.tasks.requests.look import ConfigRequest

EXAMPLES = """
\b
Examples:
  mm config run.yaml
  mm config run.yaml training.lr=2e-5 --given
  mm config --from-flags finetune.sh > run.yaml
  mm config --from llama3_lora_sft.yaml > run.yaml
  mm config --from swift sft --model Qwen/Qwen3-4B --dataset rows.jsonl > run.yaml
  WORLD_SIZE=8 mm config --from-flags --lr 1e-5 --train-iters 100 --micro-batch-size 1 --mm-model model.json
"""

_FROM_FLAGS, _FROM = "--from-flags", "--from"


class _ConfigCommand(click.Command):
    """Everything behind `--from-flags` and `--from` belongs to the launch, whatever it looks like; but for a last
    `--json`, which no launch has."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Set the words of a launch aside."""
        for option in (_FROM_FLAGS, _FROM):
            if option in args:
                at = args.index(option) + 1
                words = args[at:]
                is_json = option == _FROM and words[-1:] == ["--json"]
                ctx.meta[option] = words[:-1] if is_json else words
                args = [*args[:at], *words[len(words) - is_json :]]
                break
        return super().parse_args(ctx, args)


@click.command(cls=_ConfigCommand, epilog=EXAMPLES)
@takes(ConfigRequest)
def command(request: ConfigRequest) -> None:
    """Show CONFIG as a run would see it, with the origin of each value: default, file and line, command line, derived.

    OVERRIDES are section.key=value, each parsed as YAML.
    """
    context, config = click.get_current_context(), request.config
    notes: tuple[str, ...] = ()
    if request.from_other:
        if config is not None:
            raise click.UsageError(f"{_FROM} takes no other configuration: remove {config}.", context)
        _import(context.meta[_FROM], request.as_json)
        return
    if request.from_flags:
        if config is not None:
            raise click.UsageError(f"{_FROM_FLAGS} takes no other configuration: remove {config}.", context)
        translated = task.run_flags(context.meta[_FROM_FLAGS], os.environ)
        resolved = translated.config
        notes = (*translated.notes, *task.notes_on_inputs(resolved))
    elif config is None:
        raise click.UsageError("Missing argument 'CONFIG'.", context)
    else:
        resolved = task.run(config, request.overrides)
    if request.as_json:
        say_json({**task.as_dict(resolved), "notes": notes}, indent=2)
        return
    for warning in resolved.warnings:
        say(f"warning: {warning}", err=True)
    for note in notes:
        say(f"note: {note}", err=True)
    say(task.as_text(resolved, only_given=request.given or request.from_flags), end="")


def _import(words: list[str], as_json: bool) -> None:
    """Print another trainer's setup in our words; the counts go to stderr."""
    from mindspeed_mm.tasks.importing import importing, writing  # tables of other tools: for this option alone

    imported = importing.run(words)
    if as_json:
        say_json(writing.as_dict(imported), indent=2)
        return
    say(writing.as_text(imported), end="")
    for warning in importing.warnings_of(imported):
        say(f"warning: {warning}", err=True)
    say(f"note: {writing.counts(imported)}", err=True)
