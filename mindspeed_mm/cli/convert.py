"""The command `mm convert`: converts a checkpoint to another layout."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal, get_args

import click

from mindspeed_mm.checkpoint.recognise import Layout, told_ways
from mindspeed_mm.core.terminal import say, say_json

EXAMPLES = f"""
\b
Examples:
  mm convert models/Qwen3-0.6B models/Qwen3-0.6B-dcp --to dcp
  mm convert models/Qwen3-0.6B-dcp exported/Qwen3-0.6B --to hf --model models/Qwen3-0.6B
  mm convert models/Qwen2.5-VL-7B-Instruct qwen-tp2-pp2 --to megatron --tp 2 --pp 2
  mm convert qwen-tp2-pp2 exported/Qwen2.5-VL --to hf --model models/Qwen2.5-VL-7B-Instruct
  mm convert models/ltx-2-19b-dev.safetensors models/LTX-2-transformer --to diffusers
  mm convert models/Wan2.1-T2V-1.3B-Diffusers/transformer models/Wan2.1-T2V-1.3B --to original
  mm convert models/Wan2.1-T2V-1.3B-Diffusers/transformer models/Wan2.1-mm --to megatron
  mm convert models/Fun-CosyVoice3-0.5B-2512 models/Fun-CosyVoice3-0.5B
  mm convert --verify-only qwen-tp2-pp2

Ways: {told_ways()}.
mm-convert has a converter for each family, with every flag: also hf2mg and mg2hf, to and from Megatron.
"""
PATH = click.Path(path_type=Path)
_VERIFY: dict[str, bool | Literal["full"]] = {"true": True, "false": False, "full": "full"}


@click.command(epilog=EXAMPLES)
@click.argument("source", type=PATH)
@click.argument("target", type=PATH, required=False)
@click.option(
    "--to",
    type=click.Choice(get_args(Layout)),
    help="Layout of TARGET; default: dcp of a Hugging Face folder, hf of a checkpoint.",
)
@click.option("--tp", type=click.IntRange(min=1), help="To megatron: ranks that divide each layer.")
@click.option("--pp", type=click.IntRange(min=1), help="To megatron: pipeline stages, layers divided evenly.")
@click.option("--vpp", type=click.IntRange(min=1), help="To megatron: virtual chunks on each stage.")
@click.option("--ep", type=click.IntRange(min=1), help="To megatron: ranks that divide the experts.")
@click.option("--model", "model_folder", type=PATH, help="Folder with config.json and tokenizer, for a checkpoint.")
@click.option("--overwrite", is_flag=True, help="Replace what an earlier conversion wrote to TARGET.")
@click.option(
    "--verify",
    type=click.Choice(["true", "false", "full"]),
    default="true",
    is_flag=False,
    flag_value="true",
    show_default=True,
    help="Read everything back and compare, also the logits of a language model; full: of models of any size.",
)
@click.option("--no-verify", "verify", flag_value="false", help="The same as --verify false.")
@click.option(
    "--allow-unused",
    is_flag=True,
    help="Leave out stored tensors that the model has no place for, and name them; else they are an error.",
)
@click.option("--verify-only", is_flag=True, help="Compare SOURCE with the checksums of its conversion; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(
    source: Path,
    target: Path | None,
    to: Layout | None,
    tp: int | None,
    pp: int | None,
    vpp: int | None,
    ep: int | None,
    model_folder: Path | None,
    overwrite: bool,
    verify: str,
    allow_unused: bool,
    verify_only: bool,
    as_json: bool,
) -> None:
    """Convert a checkpoint to another layout.

    SOURCE is recognised: a Hugging Face folder, a distributed checkpoint, a run, a Megatron-style folder, a
    generator's weights, a text model in GGUF or CosyVoice3's release. TARGET appears when it is complete, with a
    manifest of every tensor's checksum; a folder made from GGUF has none.
    """
    from mindspeed_mm.tasks.convert import convert  # torch: not for --help

    if verify_only:
        if target is not None:
            raise click.UsageError("--verify-only takes one folder, and writes none.")
        tensors, size_bytes = convert.compare(source)
        told = f"{source}: {tensors:,} tensors, {size_bytes / 2**20:,.1f} MiB, are what was written"
        if as_json:
            told = json.dumps({"tensors": tensors, "size_bytes": size_bytes})
        say(told)
        return
    if target is None:
        raise click.UsageError("Missing argument 'TARGET'.")
    division = None
    if any((tp, pp, vpp, ep)):
        division = convert.Division(tp or 1, pp or 1, vpp or 1, ep or 1)
    kind, done = convert.run(
        source,
        target,
        to,
        division=division,
        model_folder=model_folder,
        overwrite=overwrite,
        verify=_VERIFY[verify],
        allow_unused=allow_unused,
    )
    if as_json:
        say_json({"source_kind": kind, **dataclasses.asdict(done)})
        return
    say("\n".join(done.lines(f"from a folder of kind '{kind}'")))
