"""What a verification computes: the plan at its smallest, and the configuration with everything left out or fixed that
would make two runs of it differ, or write somewhere. Pure: no file, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.config_path import value_at
from mindspeed_mm.fsdp.ops.attention_kernels import OF_PACKAGES
from mindspeed_mm.fsdp.params.argument import Arguments, ModelArguments
from mindspeed_mm.fsdp.params.data_args import DataArguments, DataloaderParam
from mindspeed_mm.fsdp.params.loader import ResolvedConfig
from mindspeed_mm.fsdp.params.parallel_args import FsdpPlan, ParallelArguments
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes, resolve_parallel_sizes
from mindspeed_mm.fsdp.params.tools_args import ToolsArguments
from mindspeed_mm.fsdp.params.training_args import TrainingArguments

STEPS = 2
SMALLEST_AXIS = 2
MOST_PROCESSES = 8
"""Axes above two are kept as long as so many processes are enough."""
LEAST_ROWS = 4
"""Minimum number of rows in an optimizer step."""
LEAST_ADAM_EPS = 1e-8
"""Below it AdamW turns rounding noise of gradients that are zero into whole steps."""
_AXES = ("pipeline_parallel_size", "tensor_parallel_size", "ring_attention_size", "ulysses_parallel_size")
_BY_LENGTH = ("TokenBudgetSampler", "LengthGroupedSampler", "BucketBatchSampler", "VariableVideoBatchSampler")
"""Samplers that choose the samples of a step by their lengths."""
_NO_CPU_KERNEL = (*OF_PACKAGES, "flex", "flex_attention", "native-sparse")


@dataclass(frozen=True)
class Setup:
    """A configuration that can be compared with itself."""

    arguments: Arguments
    """With the plan at its smallest."""
    sizes: ParallelSizes
    accumulation: int
    """Micro-batches of a rank in a step, in the run as planned; twice as many in the accumulated one."""
    rows: int
    """Rows of a step, over all ranks."""
    changes: tuple[str, ...]
    """What is not as configured, a line each."""


@dataclass(frozen=True)
class Case:
    """One run of two steps."""

    alone: bool = False
    """By one process, without any plan."""
    micro_batches: int = 1
    """Micro-batches of a rank in a step."""
    save: Path | None = None
    """Run folder."""
    stops: bool = False
    """After the first step, which it saves."""
    resumes: bool = False
    """Goes on from what is saved there."""
    packs: bool | None = None
    """The samples of a micro-batch share a row, or have one each; None: as configured."""


@dataclass(frozen=True)
class VerifyJob:
    """What every process is told."""

    config: ResolvedConfig
    """The configuration as the user wrote it."""
    setup: Setup
    folder: Path
    """Records, small models, checkpoints."""
    full: bool = False
    fault: str | None = None
    one_size: bool = True
    """Whether samples fit into batches of any size: those of generators have sizes, and packs are planned whole."""
    rows: tuple[int, ...] | None = None
    """Numbers of the rows that are trained on; None: all."""
    unpackable: str = ""
    """Why samples cannot share a row; empty when they can."""


@dataclass(frozen=True)
class OneProcess:
    """What the one process has found out."""

    job: VerifyJob
    """For the processes of the plan: with the model that is compared."""
    model: str
    """The model in words."""


def set_up(arguments: Arguments, nproc: int | None, cache: Path, *, full: bool) -> Setup:
    """The comparable configuration and its plan.

    Args:
        arguments: As resolved.
        nproc: `--nproc`; None: as few processes as the plan needs.
        cache: Where data sets may keep what they convert.
        full: With the real model's weights.

    Raises:
        ConfigError: The sizes of the plan do not go together.
    """
    parallel, sizes = smallest_plan(arguments.parallel, nproc)
    accumulation = sizes.pp  # as many micro-batches as fill a pipeline
    at_a_time = accumulation if parallel.pp_plan.micro_batches else None
    plans = {
        "fsdp_plan": _exact_plan(parallel.fsdp_plan, sizes),
        "pp_plan": parallel.pp_plan.model_copy(update={"micro_batches": at_a_time}),
    }
    parallel = parallel.model_copy(update=plans)
    comparable = arguments.model_copy(
        update={
            "parallel": parallel,
            "training": _comparable_training(arguments.training, full=full),
            "data": _comparable_data(arguments.data, cache),
            "model": arguments.model.model_copy(update=_kernels(arguments.model)),
            "tools": ToolsArguments(),  # two steps are compared, not profiled
        }
    )
    unit = 2 * accumulation * sizes.dp
    rows = unit * math.ceil(LEAST_ROWS / unit)
    batch = arguments.training.micro_batch_size * arguments.training.gradient_accumulation_steps
    changes = [
        *_told_changes(arguments, comparable),
        f"rows of a step: {rows} ({batch} on each data rank in training)",
        f"{STEPS} steps; nothing is validated, sampled or kept",
    ]
    return Setup(comparable, sizes, accumulation, rows, tuple(changes))


def arguments_of(setup: Setup, case: Case) -> Arguments:
    """The configuration of one run."""
    arguments = setup.arguments
    data_ranks = 1 if case.alone else setup.sizes.dp
    training = arguments.training.model_copy(
        update={
            "micro_batch_size": setup.rows // data_ranks // case.micro_batches,
            "gradient_accumulation_steps": case.micro_batches,
            "save": str(case.save) if case.save else None,
        }
    )
    changes: dict[str, object] = {"training": training}
    if case.alone:
        whole = arguments.parallel.fsdp_plan.model_copy(update={"reshard_after_forward": True})
        changes["parallel"] = ParallelArguments(fsdp_plan=whole)
    return arguments.model_copy(update=changes)


# --- the plan ---------------------------------------------------------------------------------------------------------


def smallest_plan(parallel: ParallelArguments, nproc: int | None) -> tuple[ParallelArguments, ParallelSizes]:
    """The plan with every data axis that it uses cut to two ranks, and with the others as they are while eight
    processes are enough, else cut to two as well; with `nproc`, the plan as it is on so many.

    Raises:
        ConfigError: Sizes that do not go together.
    """
    if nproc is not None:
        return parallel, resolve_parallel_sizes(parallel, nproc)
    plan, world = _with_data_axes(parallel)
    if world > MOST_PROCESSES:
        cut: dict[str, object] = {axis: min(parallel[axis], SMALLEST_AXIS) for axis in _AXES}
        own = {}
        for axis in _AXES[1:]:  # a tower has no pipeline
            size = parallel.encoder_plan[axis]
            if size is not None:
                own[axis] = min(size, SMALLEST_AXIS)
        cut["encoder_plan"] = parallel.encoder_plan.model_copy(update=own)
        context = parallel.ring_attention_size * parallel.ulysses_parallel_size
        plan, world = _with_data_axes(parallel.model_copy(update=cut), was_context=context)
    return plan, resolve_parallel_sizes(plan, world)


def _with_data_axes(parallel: ParallelArguments, was_context: int | None = None) -> tuple[ParallelArguments, int]:
    """The plan with data axes of two ranks, and its number of processes."""
    context = parallel.ring_attention_size * parallel.ulysses_parallel_size
    was_context = was_context or context
    asked, data_ranks = parallel.fully_shard_parallel_size, parallel.data_parallel_size
    experts = min(parallel.expert_parallel_size, SMALLEST_AXIS)
    within = parallel.expert_fully_shard_parallel_size
    if within:
        within = min(within, SMALLEST_AXIS)
    is_auto = asked == "auto"
    shards, copies = SMALLEST_AXIS, 1
    if data_ranks == 1:
        shards = 1
    if not is_auto:
        resolve_parallel_sizes(parallel.model_copy(update={"expert_parallel_size": 1}), _ranks_of(parallel))
        if int(asked) <= was_context:  # the sharding group is the context group: no data axis in it
            shards = 1
        if data_ranks is None or data_ranks * was_context > int(asked):  # several sharding groups
            copies = SMALLEST_AXIS
    shards = max(shards, math.ceil(experts * (within or 1) / context))
    update = {
        "data_parallel_size": None,
        "fully_shard_parallel_size": "auto" if is_auto else shards * context,
        "expert_parallel_size": experts,
        "expert_fully_shard_parallel_size": within,
    }
    model_ranks = parallel.pipeline_parallel_size * parallel.tensor_parallel_size * context
    return parallel.model_copy(update=update), model_ranks * shards * copies


def _ranks_of(parallel: ParallelArguments) -> int:
    """The fewest ranks of a plan that names its sharding group: what is off about it is found with these."""
    model_ranks = parallel.pipeline_parallel_size * parallel.tensor_parallel_size
    context = parallel.ring_attention_size * parallel.ulysses_parallel_size
    if parallel.data_parallel_size is None:
        return model_ranks * math.lcm(int(parallel.fully_shard_parallel_size), context)
    return model_ranks * parallel.data_parallel_size * context


def _exact_plan(plan: FsdpPlan, sizes: ParallelSizes) -> FsdpPlan:
    """In fp64; a group to reshard to that the fewer ranks no longer have becomes all of them."""
    update: dict[str, object] = {"param_dtype": "fp64", "reduce_dtype": None, "output_dtype": None, "pin_memory": False}
    reshard = plan.reshard_after_forward
    if not isinstance(reshard, bool) and sizes.fsdp % reshard:
        update["reshard_after_forward"] = True
    return plan.model_copy(update=update)


# --- the other sections -----------------------------------------------------------------------------------------------


def _comparable_training(training: TrainingArguments, *, full: bool) -> TrainingArguments:
    """Two steps at a constant rate that writes nothing; the optimizer's state is saved and loaded where runs resume."""
    adapters: dict[str, object] = {"dropout": 0.0}
    if not full:
        adapters["pretrained_lora_path"] = None
    update: dict[str, object] = {
        "train_iters": STEPS, "train_epochs": None, "lr_decay_style": "constant", "lr_warmup_ratio": 0.0,
        "adam_fused": False, "adam_eps": max(training.adam_eps, LEAST_ADAM_EPS), "allow_hf32": None,
        "save": None, "save_format": "dcp", "save_interval": 0, "save_async": False, "save_ckpt_dtype": None,
        "no_load_optim": False, "no_load_rng": False, "no_save_optim": False, "no_save_rng": False,
        "val_interval": 0, "manual_gc_interval": 0, "log_interval": 1,
        "sampling": training.sampling.model_copy(update={"interval": 0}),
        "lora": training.lora.model_copy(update=adapters),
    }  # fmt: skip
    if not full:
        update["load"] = None
    return training.model_copy(update=update)


def _comparable_data(data: DataArguments, cache: Path) -> DataArguments:
    """The training rows alone, read by the ranks themselves; what is converted of them goes to `cache`."""
    basic = data.dataset_param.basic_parameters
    update: dict[str, object] = {"val_dataset": None, "cache_dir": str(cache)}
    if "val_features_dir" in basic:
        update["val_features_dir"] = None
    dataset = data.dataset_param.model_copy(update={"basic_parameters": basic.model_copy(update=update)})
    loading: dict[str, object] = {"num_workers": 0, "prefetch_factor": None, "max_tokens_per_batch": None}
    if not basic.packs:
        loading |= _drawn_one_by_one(data.dataloader_param)
    loader = data.dataloader_param.model_copy(update=loading)
    return data.model_copy(update={"dataset_param": dataset, "val_dataset_param": None, "dataloader_param": loader})


def _drawn_one_by_one(loader: DataloaderParam) -> dict[str, object]:
    """Samples in the order in which they are drawn: chosen by their lengths, those of a step would be others in
    micro-batches of another size."""
    update: dict[str, object] = {"max_patches_per_batch": None}
    if loader.sampler_type in _BY_LENGTH:
        update["sampler_type"] = "BaseRandomBatchSampler"
    if loader.dataloader_mode == "variable":
        update["dataloader_mode"] = "sampler"
    return update


def _kernels(model: ModelArguments) -> dict[str, object]:
    """An attention kernel that a CPU has."""
    if model.attn_implementation in _NO_CPU_KERNEL:
        return {"attn_implementation": None}
    return {}


_TOLD = (
    *(f"parallel.{axis}" for axis in _AXES), "parallel.fully_shard_parallel_size", "parallel.expert_parallel_size",
    "parallel.expert_fully_shard_parallel_size", "parallel.pp_plan.micro_batches", "parallel.fsdp_plan.param_dtype",
    "parallel.fsdp_plan.reshard_after_forward", "model.attn_implementation", "training.lr_decay_style",
    "training.lr_warmup_ratio", "training.adam_eps", "training.lora.dropout", "training.lora.pretrained_lora_path",
    "training.load", "data.dataloader_param.max_tokens_per_batch", "data.dataloader_param.max_patches_per_batch",
    "data.dataloader_param.sampler_type", "data.dataloader_param.dataloader_mode",
)  # fmt: skip
"""Keys whose change bears on what is compared."""


def _told_changes(before: Arguments, now: Arguments) -> Iterator[str]:
    for key in _TOLD:
        old, new = value_at(before, key), value_at(now, key)
        if old != new:
            yield change_line(key, old, new)


def change_line(key: str, old: object, new: object) -> str:
    """Return a changed setting as one line of text: `key: before → now`. Long values are shortened."""
    return f"{key}: {_short(old)} → {_short(new)}"


def _short(value: object) -> str:
    if value is None:
        return "null"
    text = str(value)
    if len(text) <= 32:
        return text
    return f"{text[:29]}…"
