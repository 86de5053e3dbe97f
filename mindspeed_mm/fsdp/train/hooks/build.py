"""The hooks of a run, in the order in which they come to their turn after a step."""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_mm.fsdp.train.hooks.adapter_start import adapter_start_hook
from mindspeed_mm.fsdp.train.hooks.checkpoint import checkpoint_hook
from mindspeed_mm.fsdp.train.hooks.compile import compile_hook
from mindspeed_mm.fsdp.train.hooks.data import data_hook
from mindspeed_mm.fsdp.train.hooks.garbage import garbage_hook
from mindspeed_mm.fsdp.train.hooks.log import log_hook
from mindspeed_mm.fsdp.train.hooks.memory_profile import memory_profile_hook
from mindspeed_mm.fsdp.train.hooks.scales import scales_hook
from mindspeed_mm.fsdp.train.hooks.time_profile import time_profile_hook
from mindspeed_mm.fsdp.train.hooks.validation import validation_hook
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.train_engine import Hook

BUILDERS: tuple[Callable[[RunParts], Hook | None], ...] = (
    adapter_start_hook,
    log_hook,
    checkpoint_hook,  # before validation: what fails there, or is cut off, finds the weights committed
    validation_hook,
    lambda parts: parts.family.sampling_hook(parts.assembled.model, parts.job, parts.record),
    data_hook,
    compile_hook,
    scales_hook,
    garbage_hook,
    memory_profile_hook,
    time_profile_hook,  # the last: what others do is not recorded
)
"""Each says whether its hook applies to a run: None when it does not."""


def build_hooks(parts: RunParts) -> list[Hook]:
    """The hooks that apply."""
    built = [build(parts) for build in BUILDERS]
    return [hook for hook in built if hook is not None]
