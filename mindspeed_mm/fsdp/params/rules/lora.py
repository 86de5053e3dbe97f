"""Rules between the keys of `training.lora` and of what it goes together with."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.lora_args import LoraArguments

_KEY = "training.lora"


def lora_problems(arguments: Arguments) -> Iterator[Problem]:
    """What adapters cannot do as the configuration stands."""
    if arguments.training.lora.enable:
        yield from _of_the_base(arguments.training.lora)
        yield from _of_the_plan(arguments)


def _of_the_base(lora: LoraArguments) -> Iterator[Problem]:
    start = lora.init_lora_weights
    moves = isinstance(start, str) and start.startswith(("pissa", "olora", "corda"))
    if lora.quantize and moves:
        yield Problem(
            f"'{start}' takes its values from the base weights, which training.lora.quantize has rounded",
            key=f"{_KEY}.init_lora_weights",
            way_out="Use loftq, which compensates for the rounding, or leave training.lora.quantize out.",
        )
    if lora.quantize and lora.use_dora:
        yield Problem(
            "true, but DoRA needs the norms of the base weights in each step, and training.lora.quantize stores them "
            "in few bits",
            key=f"{_KEY}.use_dora",
            way_out="Keep one of them.",
        )
    if start == "loftq" and not lora.quantize:
        yield Problem(
            "'loftq' compensates for quantisation, but nothing is quantised",
            key=f"{_KEY}.init_lora_weights",
            way_out="Set training.lora.quantize: nf4.",
        )
    if lora.pretrained_lora_path and start not in (True, False):
        yield Problem(
            f"{start!r}, but training.lora.pretrained_lora_path already gives the adapters' first values",
            key=f"{_KEY}.init_lora_weights",
            way_out="Keep one of them.",
        )


def _of_the_plan(arguments: Arguments) -> Iterator[Problem]:
    lora, parallel = arguments.training.lora, arguments.parallel
    size = parallel.tensor_parallel_size
    if size > 1 and lora.use_dora:
        yield Problem(
            f"true, but tensor_parallel_size is {size}: a rank that has a part of a row cannot measure it",
            key=f"{_KEY}.use_dora",
            way_out="Set parallel.tensor_parallel_size: 1; sharding alone does it.",
        )
    for key, count in (("tensor", size), ("pipeline", parallel.pipeline_parallel_size)):
        if count > 1 and lora.quantize:
            yield Problem(
                f"'{lora.quantize}', but {key}_parallel_size is {count}: quantised weights can only be sharded",
                key=f"{_KEY}.quantize",
                way_out=f"Set parallel.{key}_parallel_size: 1.",
            )
        if count > 1 and lora.init_lora_weights in ("eva", "corda"):
            yield Problem(
                f"'{lora.init_lora_weights}' reads the inputs of layers, but {key}_parallel_size is {count}",
                key=f"{_KEY}.init_lora_weights",
                way_out=f"Set parallel.{key}_parallel_size: 1, or choose another initialisation.",
            )
