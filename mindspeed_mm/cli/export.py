"""The command `mm export`: writes a run as a folder that libraries load."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mindspeed_mm.core.terminal import say, say_json

if TYPE_CHECKING:
    from mindspeed_mm.checkpoint.original.lora_names import LoraFormat
    from mindspeed_mm.fsdp.checkpoint.loading import Weights

EXAMPLES = """
\b
Examples:
  mm export runs/digits exported/digits
  mm export runs/digits exported/digits-400 --step 400 --dtype bf16 --json
  mm export runs/digits-lora exported/digits-merged --merge
  mm export runs/wan-lora exported/wan-comfyui --lora-format comfyui
"""


@click.command(epilog=EXAMPLES)
@click.argument("run", metavar="RUN_OR_CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint",
    "--step",
    "step",
    metavar="best|newest|STEP",
    help="Checkpoint of the run to export; default: the best one if the run keeps one, else the newest.",
)
@click.option(
    "--weights",
    type=click.Choice(["ema", "model"]),
    help="Export the moving average or the trained weights; default: the average if the run kept one.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32", "fp64"]),
    help="Type of the exported weights; default: that of the model the run started from.",
)
@click.option(
    "--model",
    "model_folder",
    type=click.Path(path_type=Path),
    help="Folder with everything but the trained weights; default: the one the run started from.",
)
@click.option(
    "--merge", is_flag=True, help="For a run that trained adapters: write the whole model with the adapters merged."
)
@click.option("--transformer-only", is_flag=True, help="For a generator: leave out encoders and other components.")
@click.option(
    "--single-file",
    is_flag=True,
    help="For a generator: write the transformer as one file under its authors' names, as ComfyUI reads it.",
)
@click.option(
    "--lora-format",
    type=click.Choice(["diffusers", "comfyui", "kohya"]),
    default="diffusers",
    help="For a generator's adapters: whose names the file uses; default: those of diffusers.",
)
@click.option("--overwrite", is_flag=True, help="Replace what an earlier export or merge wrote to OUT.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(
    run: Path,
    out: Path,
    step: str | None,
    weights: Weights | None,
    dtype: str | None,
    model_folder: Path | None,
    merge: bool,
    transformer_only: bool,
    single_file: bool,
    lora_format: LoraFormat,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write a run's weights as a folder OUT that loads without this package, with a model card.

    RUN_OR_CHECKPOINT is a run folder or one of its iter_* folders. OUT is a Hugging Face folder with configuration,
    tokenizer and processor; for a generator, a whole folder for diffusers; for a run that trained adapters, a folder of
    adapters for PEFT or for a diffusers pipeline. It appears once it is complete.
    """
    from mindspeed_mm.tasks.export import export  # torch: not for --help

    exported = export.run(
        run,
        out,
        step=step,
        weights=weights,
        dtype=dtype,
        model_folder=model_folder,
        merge=merge,
        transformer_only=transformer_only,
        single_file=single_file,
        lora_format=lora_format,
        overwrite=overwrite,
    )
    if as_json:
        say_json(dataclasses.asdict(exported))
        return
    for note in exported.notes:
        say(f"warning: {note}", err=True)
    average = "the average of the weights " if exported.weights == "ema" else ""
    say(
        f"{exported.folder}: {exported.tensors:,} tensors, {exported.size_bytes / 2**20:,.1f} MiB, "
        f"{average}from {exported.checkpoint}{f' ({exported.why})' if exported.why else ''}"
    )
