"""`mm convert`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from mindspeed_mm.tasks.convert.convert import Layout

EXAMPLES = """
\b
Examples:
  mm convert models/Qwen3-0.6B models/Qwen3-0.6B-dcp --to dcp
  mm convert models/Qwen3-0.6B-dcp exported/Qwen3-0.6B --to hf --model models/Qwen3-0.6B
  mm convert models/Qwen2.5-VL-7B-Instruct qwen-tp2-pp2 --to megatron --tp 2 --pp 2
  mm convert qwen-tp2-pp2 exported/Qwen2.5-VL --to hf --model models/Qwen2.5-VL-7B-Instruct
  mm convert models/ltx-2-19b-dev.safetensors models/LTX-2-transformer --to diffusers
  mm convert models/Wan2.1-T2V-1.3B-Diffusers/transformer models/Wan2.1-T2V-1.3B --to original
  mm convert models/Wan2.1-T2V-1.3B-Diffusers/transformer models/Wan2.1-mm --to megatron

mm-convert has a converter for each family, with every flag: also hf2mg and mg2hf, to and from Megatron.
"""
PATH = click.Path(path_type=Path)


@click.command(epilog=EXAMPLES)
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option(
    "--to",
    type=click.Choice(["hf", "dcp", "megatron", "diffusers", "original"]),
    help="Layout of TARGET; default: dcp of a Hugging Face folder, hf of a checkpoint.",
)
@click.option("--tp", type=click.IntRange(min=1), help="To megatron: ranks that divide each layer.")
@click.option("--pp", type=click.IntRange(min=1), help="To megatron: pipeline stages, layers divided evenly.")
@click.option("--vpp", type=click.IntRange(min=1), help="To megatron: virtual chunks on each stage.")
@click.option("--ep", type=click.IntRange(min=1), help="To megatron: ranks that divide the experts.")
@click.option("--model", "model_folder", type=PATH, help="Folder with config.json and tokenizer, for a checkpoint.")
@click.option("--overwrite", is_flag=True, help="Replace what an earlier conversion wrote to TARGET.")
@click.option("--verify/--no-verify", default=True, show_default=True, help="Read everything back and compare.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(
    source: Path,
    target: Path,
    to: Layout | None,
    tp: int | None,
    pp: int | None,
    vpp: int | None,
    ep: int | None,
    model_folder: Path | None,
    overwrite: bool,
    verify: bool,
    as_json: bool,
) -> None:
    """Convert a checkpoint to another layout.

    SOURCE is recognised: a Hugging Face folder, a distributed checkpoint, a run, a Megatron-style folder or a
    generator's weights. TARGET appears when it is complete, with a manifest of every tensor's checksum.
    """
    from mindspeed_mm.tasks.convert import convert  # torch: not for --help

    division = convert.Division(tp or 1, pp or 1, vpp or 1, ep or 1) if any((tp, pp, vpp, ep)) else None
    kind, done = convert.run(
        source, target, to, division=division, model_folder=model_folder, overwrite=overwrite, verify=verify
    )
    if as_json:
        click.echo(json.dumps({"source_kind": kind, **dataclasses.asdict(done)}, default=str))
        return
    click.echo(
        f"{done.folder}: {done.tensors:,} tensors, {done.size_bytes / 2**20:,.1f} MiB, from a folder of kind '{kind}', "
        f"written in {done.write_s:.1f} s" + (f", verified in {done.verify_s:.1f} s" if verify else ", not verified")
    )
