"""Rules between keys of how a step is computed: pipeline stages, kernels, low precision, recomputation and slices."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.patterns import compile_pattern
from mindspeed_mm.fsdp.params.argument import (
    DataArguments,
    FeatureArguments,
    ModelArguments,
    ParallelArguments,
    TrainingArguments,
)
from mindspeed_mm.fsdp.params.sizes.encoder import is_given

SIZE = "parallel.pipeline_parallel_size"
PLAN = "parallel.pp_plan"
ACCUMULATION = "training.gradient_accumulation_steps"
_KEEPS_BUSY = ("1f1b", "interleaved1f1b")
"""Schedules that want a micro-batch for every rank."""


def pipeline_problems(
    parallel: ParallelArguments, training: TrainingArguments, features: FeatureArguments
) -> Iterator[Problem]:
    """What breaks a configuration with stages; nothing where there are none."""
    if parallel.pipeline_parallel_size == 1:
        return
    yield from _chunks_fit_the_schedule(parallel)
    yield from _micro_batches_fit_the_schedule(parallel, training)
    yield from _features_go_with_stages(parallel, training, features)


def _chunks_fit_the_schedule(parallel: ParallelArguments) -> Iterator[Problem]:
    schedule, chunks = parallel.pp_plan.schedule, parallel.pp_plan.virtual_stages
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


def _micro_batches_fit_the_schedule(parallel: ParallelArguments, training: TrainingArguments) -> Iterator[Problem]:
    plan, steps = parallel.pp_plan, training.gradient_accumulation_steps
    ranks, count = parallel.pipeline_parallel_size, plan.micro_batches or steps
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


def _features_go_with_stages(
    parallel: ParallelArguments, training: TrainingArguments, features: FeatureArguments
) -> Iterator[Problem]:
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


def speed_problems(
    model: ModelArguments, parallel: ParallelArguments, training: TrainingArguments
) -> Iterator[Problem]:
    """What the configuration asks for and cannot have together, or at all."""
    if model.attn_implementation == "native-sparse":
        yield Problem(
            "'native-sparse' cannot be chosen as a kernel: models whose layers select their keys (DeepSeek-V3.2, "
            "MiniMax-M3) compute it themselves",
            key="model.attn_implementation",
            way_out="Leave it out: those models keep their own, others have none.",
        )
    yield from _low_precision(parallel, training)


def _low_precision(parallel: ParallelArguments, training: TrainingArguments) -> Iterator[Problem]:
    plan = training.quantization_plan
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
    if training.lora.enable:
        yield Problem(
            "computes trained weights in 8 bits, and training.lora.enable freezes them",
            key=_QUANTIZATION,
            way_out="Keep one of them; training.lora.quantize stores frozen weights in few bits.",
        )
    if parallel.tensor_parallel_size > 1:
        yield Problem(
            "scales whole layers, and parallel.tensor_parallel_size cuts them",
            key=_QUANTIZATION,
            way_out="Set parallel.tensor_parallel_size to 1; the weights are sharded all the same.",
        )
    ema = training.ema
    if plan.fsdp_low_precision_all_gather_mode == "all" and ema.enable and ema.use_for_evaluation:
        yield Problem(
            "'all' keeps the scales of the trained weights, but training.ema.use_for_evaluation evaluates others",
            key=f"{_QUANTIZATION}.fsdp_low_precision_all_gather_mode",
            way_out="Take 'on-demand'.",
        )


# --- recomputation and slices -----------------------------------------------------------------------------------------

REENTRANT = "features.recompute_plan.use_reentrant"
DISTRIBUTED = "features.recompute_plan.distribute_saved_activations"
SLICES = "features.enable_chunk_mbs"
WEIGHTS = "features.enable_weight_offload"
_SKIPS = ("skip_flash_attn_recompute", "skip_gdn_recompute", "skip_kda_recompute")


def memory_problems(
    model: ModelArguments, data: DataArguments, parallel: ParallelArguments, features: FeatureArguments
) -> Iterator[Problem]:
    """What breaks a configuration that trades time for memory; nothing where it does not."""
    if features.recompute:
        yield from _results_can_be_kept(model, features)
    if features.recompute_plan.distribute_saved_activations is True:
        yield from _inputs_can_be_divided(parallel, features)
    if features.enable_chunk_mbs:
        yield from _rows_can_be_sliced(data, parallel, features)
    if features.enable_weight_offload:
        yield from _weights_can_wait(parallel, features)


def memory_notes(data: DataArguments, training: TrainingArguments, features: FeatureArguments) -> Iterator[Problem]:
    """What is accepted and changes nothing."""
    rows = training.micro_batch_size
    if features.enable_chunk_mbs and features.chunkmbs_plan.chunk_mbs >= rows and not _is_filled_up(data):
        yield Problem(
            f"{features.chunkmbs_plan.chunk_mbs} rows are a whole micro-batch (training.micro_batch_size is {rows}): "
            "nothing is sliced",
            key="features.chunkmbs_plan.chunk_mbs",
            way_out="Lower it to save memory, or set features.enable_chunk_mbs to false.",
        )


def _is_filled_up(data: DataArguments) -> bool:
    """Whether a micro-batch has as many rows as fit."""
    loader = data.dataloader_param
    return loader.dataloader_mode == "variable" or loader.sampler_type == "TokenBudgetSampler"


def _results_can_be_kept(model: ModelArguments, features: FeatureArguments) -> Iterator[Problem]:
    """Torch's re-entrant checkpoint runs its first pass without autograd: nothing that it computes can be kept."""
    plan = features.recompute_plan
    skipped = [f"model.{name}" for name in _SKIPS if getattr(model, name)]
    asked = ["features.recompute_plan.mode: selective", *skipped] if plan.mode == "selective" else skipped
    if plan.use_reentrant and asked:
        yield Problem(
            f"true, but {asked[0]} keeps results of the forward pass, which a re-entrant one does not have",
            key=REENTRANT,
            way_out="Set it to false.",
        )
    if model.skip_flash_attn_recompute and model.attn_implementation == "eager":
        yield Problem(
            "true, but 'eager' attention has no kernel whose result could be kept",
            key="model.skip_flash_attn_recompute",
            way_out="Leave model.attn_implementation out, or this key.",
        )
    delta_nets = [f"model.{name}" for name in _SKIPS[1:] if getattr(model, name)]
    if delta_nets and features.compile is True:
        yield Problem(
            "true, but features.compile compiles a block into one graph, from which no layer can be left out",
            key=delta_nets[0],
            way_out="Set one of them to false.",
        )


def _inputs_can_be_divided(parallel: ParallelArguments, features: FeatureArguments) -> Iterator[Problem]:
    what, way_out = why_inputs_stay_whole(parallel, features)
    if what:
        yield Problem(f"true, but {what}", key=DISTRIBUTED, way_out=way_out)


def why_inputs_stay_whole(parallel: ParallelArguments, features: FeatureArguments) -> tuple[str, str]:
    """Why tensor ranks do not divide the inputs of recomputed modules among them, whatever the model, and the way out;
    empty where they may."""
    if not features.recompute:
        return "features.recompute is false: nothing is computed again", "Set that to true."
    if parallel.tensor_parallel_size == 1:
        return "parallel.tensor_parallel_size is 1: no other rank has the same inputs", "Leave this out."
    if features.recompute_plan.mode == "selective":
        return "features.recompute_plan.mode is selective, and products outweigh the inputs", "Set it to full."
    if features.recompute_plan.use_reentrant:
        return f"{REENTRANT} lets autograd keep inputs as they are", "Set it to false."
    return "", ""


def _rows_can_be_sliced(
    data: DataArguments, parallel: ParallelArguments, features: FeatureArguments
) -> Iterator[Problem]:
    if getattr(data.dataset_param.basic_parameters, "packs", False):
        yield Problem(
            "true, but packing makes one row of a micro-batch: there is nothing to slice",
            key=SLICES,
            way_out="Set it to false, or data.dataset_param.basic_parameters.packing.",
        )
    if parallel.expert_parallel_size > 1 and _is_filled_up(data):
        yield Problem(
            "true, but micro-batches that are filled up give ranks different numbers of rows, and so of slices, in "
            "each of which they exchange tokens of experts",
            key=SLICES,
            way_out="Set it to false, or choose another data.dataloader_param.sampler_type.",
        )
    if features.skip_moe_pad_tokens:
        yield Problem(
            "true, but features.skip_moe_pad_tokens finds padding by the mask of the whole micro-batch",
            key=SLICES,
            way_out="Set one of them to false.",
        )


def _weights_can_wait(parallel: ParallelArguments, features: FeatureArguments) -> Iterator[Problem]:
    """Weights travel whole, from this process's host memory."""
    others = {
        "parallel.tensor_parallel_size": (parallel.tensor_parallel_size > 1, "splits the weights", "1"),
        "parallel.expert_parallel_size": (parallel.expert_parallel_size > 1, "spreads the weights of experts", "1"),
        "parallel.pipeline_parallel_size": (parallel.pipeline_parallel_size > 1, "runs blocks in another order", "1"),
        "parallel.fsdp_plan.cpu_offload": (parallel.fsdp_plan.cpu_offload, "keeps all weights on the host", "false"),
    }
    for key, (is_set, what, value) in others.items():
        if is_set:
            yield Problem(f"true, but {key} {what}", key=WEIGHTS, way_out=f"Set it to false, or {key} to {value}.")
    if features.compile is True and features.recompute_plan.mode == "selective":
        yield Problem(
            "true, but what brings the weights would be compiled with blocks that keep results of single operations",
            key=WEIGHTS,
            way_out="Set features.recompute_plan.mode: full, or features.compile: false.",
        )
