"""`megatron.core.num_microbatches_calculator`: the sizes of a step, which do not change in a run."""

from __future__ import annotations

from mindspeed_mm.fsdp.distributed.parallel_state import get_parallel_state
from mindspeed_mm.fsdp.train.provider.live import live_trainer


def get_num_microbatches() -> int:
    """Micro-batches of a step on each data rank."""
    return live_trainer("get_num_microbatches").arguments.training.gradient_accumulation_steps


def get_micro_batch_size() -> int:
    """Return the number of samples in a micro-batch. Raises `ConfigError` where no training is under way."""
    return live_trainer("get_micro_batch_size").arguments.training.micro_batch_size


def get_current_global_batch_size() -> int:
    """Samples of a step, over all data ranks."""
    return get_num_microbatches() * get_micro_batch_size() * get_parallel_state().data_size
