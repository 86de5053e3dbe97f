"""`megatron.core.mpu`: the ranks and groups of the parallel plan. Context parallelism has two axes here; its numbers
are those of both together."""

from __future__ import annotations

import torch.distributed as dist

from mindspeed_mm.fsdp.distributed.parallel_state import get_parallel_state


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """Which of the different streams of samples this rank reads."""
    state = get_parallel_state()
    if with_context_parallel:
        return state.data_rank * get_context_parallel_world_size() + get_context_parallel_rank()
    return state.data_rank


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """How many ranks read different samples."""
    state = get_parallel_state()
    if with_context_parallel:
        return state.data_size * get_context_parallel_world_size()
    return state.data_size


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """Return the group of ranks that read different samples, or with `with_context_parallel` those that hold different
    tokens. Every rank calls it, for the group may have to be made."""
    state = get_parallel_state()
    if with_context_parallel and get_context_parallel_world_size() > 1:
        return state.build_copies_device_mesh().get_group("copies")
    return state.axis_group("dp")


def get_tensor_model_parallel_rank() -> int:
    """Which part of each layer this rank holds."""
    return get_parallel_state().axis_rank("tp")


def get_tensor_model_parallel_world_size() -> int:
    """In how many parts layers are cut."""
    return get_parallel_state().axis_size("tp")


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold them."""
    return get_parallel_state().axis_group("tp")


def get_pipeline_model_parallel_rank() -> int:
    """Where this rank stands in the pipeline."""
    return get_parallel_state().axis_rank("pp")


def get_pipeline_model_parallel_world_size() -> int:
    """Return the number of ranks along the pipeline."""
    return get_parallel_state().axis_size("pp")


def get_pipeline_model_parallel_group() -> dist.ProcessGroup:
    """Return the group of ranks that make up this rank's pipeline."""
    return get_parallel_state().axis_group("pp")


def is_pipeline_first_stage(ignore_virtual: bool = False) -> bool:
    """Whether this rank is the pipeline's first."""
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = False) -> bool:
    """Whether this rank is the pipeline's last."""
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def get_context_parallel_world_size() -> int:
    """Ranks that share a sequence."""
    return get_parallel_state().sizes.cp


def get_context_parallel_rank() -> int:
    """Which part of a sequence this rank has."""
    return get_parallel_state().axis_rank("cp")
