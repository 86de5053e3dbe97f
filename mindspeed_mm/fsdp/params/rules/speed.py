"""Rules between the keys that make a step faster."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.patterns import compile_pattern
from mindspeed_mm.fsdp.params.argument import Arguments

_PLAN = "training.quantization_plan"


def speed_problems(arguments: Arguments) -> Iterator[Problem]:
    """What the configuration asks for and cannot have together, or at all."""
    if arguments.model.attn_implementation == "native-sparse":
        yield Problem(
            "'native-sparse' cannot be chosen as a kernel: models whose layers select their keys (DeepSeek-V3.2, "
            "MiniMax-M3) compute it themselves",
            key="model.attn_implementation",
            way_out="Leave it out: those models keep their own, others have none.",
        )
    yield from _low_precision(arguments)


def _low_precision(arguments: Arguments) -> Iterator[Problem]:
    plan = arguments.training.quantization_plan
    if plan is None:
        return
    if plan.recipe_name is None:
        yield Problem(
            "is not given, so nothing would be in low precision",
            key=f"{_PLAN}.recipe_name",
            way_out="Name one, e.g. tensorwise or mxfp8, or leave the plan out.",
        )
        return
    for name in ("apply_modules", "ignored_modules"):
        for pattern in getattr(plan, name):
            try:
                compile_pattern(pattern, key=f"{_PLAN}.{name}")
            except ConfigError as error:
                yield from error.problems
    if arguments.training.lora.enable:
        yield Problem(
            "computes trained weights in 8 bits, and training.lora.enable freezes them",
            key=_PLAN,
            way_out="Keep one of them; training.lora.quantize stores frozen weights in few bits.",
        )
    if arguments.parallel.tensor_parallel_size > 1:
        yield Problem(
            "scales whole layers, and parallel.tensor_parallel_size cuts them",
            key=_PLAN,
            way_out="Set parallel.tensor_parallel_size to 1; the weights are sharded all the same.",
        )
    ema = arguments.training.ema
    if plan.fsdp_low_precision_all_gather_mode == "all" and ema.enable and ema.use_for_evaluation:
        yield Problem(
            "'all' keeps the scales of the trained weights, but training.ema.use_for_evaluation evaluates others",
            key=f"{_PLAN}.fsdp_low_precision_all_gather_mode",
            way_out="Take 'on-demand'.",
        )
