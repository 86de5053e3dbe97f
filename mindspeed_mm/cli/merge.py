"""The command `mm merge`: merges adapters into a model's weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from mindspeed_mm.core.terminal import say, say_json

EXAMPLES = """
\b
Examples:
  mm merge models/Qwen3-VL-2B-Instruct runs/digits-lora/hf/iter_0000400 --out models/digits
  mm merge models/wan style.safetensors motion/ --scale 0.8 --scale 1 --out models/wan-styled --dtype bf16
  mm merge runs/digits-lora --out models/digits
"""
PATH = click.Path(path_type=Path)


@click.command(epilog=EXAMPLES)
@click.argument("base", metavar="BASE_OR_RUN", type=PATH)
@click.argument("adapters", metavar="[ADAPTER]...", nargs=-1, type=PATH)
@click.option("--out", type=PATH, required=True, help="Folder to write the merged model to.")
@click.option(
    "--scale",
    "scales",
    type=float,
    multiple=True,
    help="Factor on an adapter; give one for all, or one each. -1 removes an adapter that was merged before.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32", "fp64"]),
    help="Type of the merged weights; default: that of the base.",
)
@click.option("--plugin", "plugins", multiple=True, help="Package to import first that registers the model's family.")
@click.option("--overwrite", is_flag=True, help="Replace what an earlier export or merge wrote to --out.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(
    base: Path,
    adapters: tuple[Path, ...],
    out: Path,
    scales: tuple[float, ...],
    dtype: str | None,
    plugins: tuple[str, ...],
    overwrite: bool,
    as_json: bool,
) -> None:
    """Add adapters to the weights of a model and write it as a folder that loads without them.

    BASE is a model folder of transformers, or a generator in diffusers' layout; an ADAPTER is a folder or a file as
    PEFT, diffusers or mm train writes it: LoRA, rsLoRA or DoRA, also with ranks that differ by layer, on experts, or
    with modules that were trained whole. A RUN by itself is merged into the model that it started from.
    """
    from mindspeed_mm.fsdp.utils.register import import_plugin
    from mindspeed_mm.tasks.export import merge  # torch: not for --help

    import_plugin(plugins, key="--plugin")
    merged = merge.run(base, adapters, out, scales=scales, dtype=dtype, overwrite=overwrite)
    if as_json:
        say_json(dataclasses.asdict(merged))
        return
    say(
        f"{merged.folder}: {merged.tensors:,} tensors, {merged.size_bytes / 2**20:,.1f} MiB, with "
        f"{', '.join(merged.merged)}"
    )
