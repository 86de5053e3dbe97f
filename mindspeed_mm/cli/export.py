"""The command `mm export`: writes a run as a folder that libraries load."""

from __future__ import annotations

import dataclasses

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.requests.export import ExportRequest

EXAMPLES = """
\b
Examples:
  mm export runs/digits exported/digits
  mm export runs/digits exported/digits-400 --step 400 --dtype bf16 --json
  mm export runs/digits-lora exported/digits-merged --merge
  mm export runs/wan-lora exported/wan-comfyui --lora-format comfyui
"""


@click.command(epilog=EXAMPLES)
@takes(ExportRequest)
def command(request: ExportRequest) -> None:
    """Write a run's weights as a folder OUT that loads without this package, with a model card.

    RUN_OR_CHECKPOINT is a run folder or one of its iter_* folders. OUT is a Hugging Face folder with configuration,
    tokenizer and processor; for a generator, a whole folder for diffusers; for a run that trained adapters, a folder of
    adapters for PEFT or for a diffusers pipeline. It appears once it is complete.
    """
    from mindspeed_mm.tasks.export import export  # torch: not for --help

    exported = export.run(request)
    if request.as_json:
        say_json(dataclasses.asdict(exported))
        return
    for note in exported.notes:
        say(f"warning: {note}", err=True)
    origin = f"from {exported.checkpoint}"
    if exported.weights == "ema":
        origin = f"the average of the weights {origin}"
    if exported.why:
        origin += f" ({exported.why})"
    size = f"{exported.tensors:,} tensors, {exported.size_bytes / 2**20:,.1f} MiB"
    say(f"{exported.folder}: {size}, {origin}")
