"""The command `mm merge`: merges adapters into a model's weights."""

from __future__ import annotations

import dataclasses

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.cli.sharing import import_plugins
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.requests.export import MergeRequest

EXAMPLES = """
\b
Examples:
  mm merge models/Qwen3-VL-2B-Instruct runs/digits-lora/hf/iter_0000400 --out models/digits
  mm merge models/wan style.safetensors motion/ --scale 0.8 --scale 1 --out models/wan-styled --dtype bf16
  mm merge runs/digits-lora --out models/digits
"""


@click.command(epilog=EXAMPLES)
@takes(MergeRequest)
def command(request: MergeRequest) -> None:
    """Add adapters to the weights of a model and write it as a folder that loads without them.

    BASE is a model folder of transformers, or a generator in diffusers' layout; an ADAPTER is a folder or a file as
    PEFT, diffusers or mm train writes it: LoRA, rsLoRA or DoRA, also with ranks that differ by layer, on experts, or
    with modules that were trained whole. A RUN by itself is merged into the model that it started from.
    """
    from mindspeed_mm.tasks.export import merge  # torch: not for --help

    import_plugins(request.plugins)
    merged = merge.run(request)
    if request.as_json:
        say_json(dataclasses.asdict(merged))
        return
    say("\n".join(merged.lines()))
