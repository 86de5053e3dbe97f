"""The command `mm convert`: converts a checkpoint to another layout."""

from __future__ import annotations

import dataclasses
import json
from typing import Literal

import click

from mindspeed_mm.checkpoint.recognise import told_ways
from mindspeed_mm.cli.requests import takes
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.requests.export import ConvertRequest

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
_VERIFY: dict[str, bool | Literal["full"]] = {"true": True, "false": False, "full": "full"}


@click.command(epilog=EXAMPLES)
@takes(ConvertRequest)
def command(request: ConvertRequest) -> None:
    """Convert a checkpoint to another layout.

    SOURCE is recognised: a Hugging Face folder, a distributed checkpoint, a run, a Megatron-style folder, a
    generator's weights, a text model in GGUF or CosyVoice3's release. TARGET appears when it is complete, with a
    manifest of every tensor's checksum; a folder made from GGUF has none.
    """
    from mindspeed_mm.tasks.convert import convert  # torch: not for --help

    source, target = request.source, request.target
    if request.verify_only:
        if target is not None:
            raise click.UsageError("--verify-only takes one folder, and writes none.")
        tensors, size_bytes = convert.compare(source)
        told = f"{source}: {tensors:,} tensors, {size_bytes / 2**20:,.1f} MiB, are what was written"
        if request.as_json:
            told = json.dumps({"tensors": tensors, "size_bytes": size_bytes})
        say(told)
        return
    if target is None:
        raise click.UsageError("Missing argument 'TARGET'.")
    sizes = (request.tp, request.pp, request.vpp, request.ep)
    division = convert.Division(*(size or 1 for size in sizes)) if any(sizes) else None
    kind, done = convert.run(
        source,
        target,
        request.to,
        division=division,
        model_folder=request.model_folder,
        overwrite=request.overwrite,
        verify=_VERIFY[request.verify],
        allow_unused=request.allow_unused,
    )
    if request.as_json:
        say_json({"source_kind": kind, **dataclasses.asdict(done)})
        return
    say("\n".join(done.lines(f"from a folder of kind '{kind}'")))
