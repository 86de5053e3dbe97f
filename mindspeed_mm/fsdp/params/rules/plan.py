"""Rules between keys of how a step is computed: pipeline stages, kernels, low precision."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.patterns import compile_pattern
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.sizes.encoder import is_given

SIZE = "parallel.pipeline_parallel_size"
PLAN = "parallel.pp_plan"
ACCUMULATION = "training.gradient_accumulation_steps"
_KEEPS_BUSY = ("1f1b", "interleaved1f1b")
"""Schedules that want a micro-batch for every rank."""


def pipeline_problems(arguments: Arguments) -> Iterator[Problem]:
    """What breaks a configuration with stages; nothing where there are none."""
    if arguments.parallel.pipeline_parallel_size == 1:
        return
    yield from _chunks_fit_the_schedule(arguments)
    yield from _micro_batches_fit_the_schedule(arguments)
    yield from _features_go_with_stages(arguments)


def _chunks_fit_the_schedule(arguments: Arguments) -> Iterator[Problem]:
    schedule, chunks = arguments.parallel.pp_plan.schedule, arguments.parallel.pp_plan.virtual_stages
    key = f"{PLAN}.virtual_stages"
    if schedule in ("gpipe", "1f1b") and chunks > 1:
        way_out = "Set it to 1, or schedule to interleaved1f1b."
        yield Problem(f"{chunks}, but the schedule {schedule} runs 1 chunk on a rank", key=key, way_out=way_out)
    if schedule == "interleaved1f1b" and chunks < 2:
        way_out = "Set it to 2, or schedule to 1f1b."
        yield Problem(f"{chunks}, but the schedule {schedule} interleaves at least 2 chunks", key=key, way_out=way_out)
    if schedule == "zbv" and chunks > 2:
        way_out = "Leave it out: zbv always uses 2."
        yield Problem(f"{chunks}, but the schedule zbv has 2 chunks on a rank", key=key, way_out=way_out)


def _micro_batches_fit_the_schedule(arguments: Arguments) -> Iterator[Problem]:
    plan, steps = arguments.parallel.pp_plan, arguments.training.gradient_accumulation_steps
    ranks, count = arguments.parallel.pipeline_parallel_size, plan.micro_batches or steps
    if steps % count:
        least = min(ranks, steps) if plan.schedule in _KEEPS_BUSY else 1
        divisors = [n for n in range(1, steps + 1) if steps % n == 0]
        fitting = ", ".join(str(n) for n in divisors if n >= least)
        yield Problem(
            f"{count} at a time do not divide the {steps} micro-batches of a step ({ACCUMULATION})",
            key=f"{PLAN}.micro_batches",
            way_out=f"Sizes that divide them: {fitting}.",
        )
    key = f"{PLAN}.micro_batches" if plan.micro_batches else ACCUMULATION
    if plan.schedule in _KEEPS_BUSY and count < ranks:
        yield Problem(
            f"{count} micro-batches are fewer than the {ranks} ranks that the schedule {plan.schedule} keeps busy",
            key=key,
            way_out=f"Raise it to {ranks}, or set {PLAN}.schedule to gpipe.",
        )
    elif plan.schedule == "interleaved1f1b" and count % (count // ranks):
        numbers = [n for n in range(ranks, 2 * count + 1) if n % (n // ranks) == 0]
        nearest = sorted(sorted(numbers, key=lambda n: abs(n - count))[:2])
        yield Problem(
            f"{count} micro-batches do not make equal rounds over {ranks} ranks",
            key=key,
            way_out=f"Nearest numbers that do: {', '.join(map(str, nearest))}.",
        )


def _features_go_with_stages(arguments: Arguments) -> Iterator[Problem]:
    parallel, features, training = arguments.parallel, arguments.features, arguments.training
    size = parallel.pipeline_parallel_size
    is_chunked = parallel.pp_plan.virtual_stages > 1 or parallel.pp_plan.schedule == "zbv"
    if features.recompute and parallel.pp_plan.schedule == "zbv":
        yield Problem(
            "true, but the schedule zbv splits backward passes and would compute every layer again for each part",
            key="features.recompute",
            way_out=f"Set {PLAN}.schedule to 1f1b or interleaved1f1b.",
        )
    if parallel.tensor_parallel_size > 1 and parallel.tp_plan.sequence_parallel and is_chunked:
        yield Problem(
            "joins tokens after the last layer of a rank, not after each chunk",
            key="parallel.tp_plan.sequence_parallel",
            way_out=f"Leave it empty, or set {PLAN}.schedule to 1f1b or gpipe.",
        )
    refused = {
        "parallel.encoder_plan": is_given(parallel.encoder_plan),
        "parallel.fsdp_plan.ignored_modules": bool(parallel.fsdp_plan.ignored_modules),
        "parallel.fsdp_plan.pregather": parallel.fsdp_plan.pregather,
        "parallel.fsdp_plan.output_dtype": parallel.fsdp_plan.output_dtype is not None,
        "training.sampling.interval": bool(training.sampling.interval),
    }
    for key, is_set in refused.items():
        if is_set:
            way_out = f"Leave it out, or set {SIZE} to 1."
            yield Problem(f"is not possible together with {size} stages ({SIZE})", key=key, way_out=way_out)


# --- kernels and low precision ----------------------------------------------------------------------------------------

_QUANTIZATION = "training.quantization_plan"


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
            key=f"{_QUANTIZATION}.recipe_name",
            way_out="Name one, e.g. tensorwise or mxfp8, or leave the plan out.",
        )
        return
    for name in ("apply_modules", "ignored_modules"):
        for pattern in getattr(plan, name):
            try:
                compile_pattern(pattern, key=f"{_QUANTIZATION}.{name}")
            except ConfigError as error:
                yield from error.problems
    if arguments.training.lora.enable:
        yield Problem(
            "computes trained weights in 8 bits, and training.lora.enable freezes them",
            key=_QUANTIZATION,
            way_out="Keep one of them; training.lora.quantize stores frozen weights in few bits.",
        )
    if arguments.parallel.tensor_parallel_size > 1:
        yield Problem(
            "scales whole layers, and parallel.tensor_parallel_size cuts them",
            key=_QUANTIZATION,
            way_out="Set parallel.tensor_parallel_size to 1; the weights are sharded all the same.",
        )
    ema = arguments.training.ema
    if plan.fsdp_low_precision_all_gather_mode == "all" and ema.enable and ema.use_for_evaluation:
        yield Problem(
            "'all' keeps the scales of the trained weights, but training.ema.use_for_evaluation evaluates others",
            key=f"{_QUANTIZATION}.fsdp_low_precision_all_gather_mode",
            way_out="Take 'on-demand'.",
        )
