"""The hooks of a run, in the order in which they come to their turn after a step."""

from __future__ import annotations

from mindspeed_mm.fsdp.train.hooks.adapter_start import adapter_start_hook
from mindspeed_mm.fsdp.train.hooks.best import best_hook
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


def build_hooks(parts: RunParts) -> list[Hook]:
    """The hooks that apply: what makes each says whether its hook does, None when it does not."""
    checkpoints, validation, evaluation = checkpoint_hook(parts), validation_hook(parts), None
    if parts.arguments.training.evaluate.interval:
        from mindspeed_mm.fsdp.train.hooks.evaluation import evaluation_hook  # a run that does not ask starts without

        evaluation = evaluation_hook(parts)
    built = [
        adapter_start_hook(parts),
        log_hook(parts),
        checkpoints,  # before what is measured: what fails there, or is cut off, finds the weights committed
        validation,
        evaluation,
        best_hook(parts, checkpoints, [validation, evaluation]),
        parts.family.sampling_hook(parts.assembled.model, parts.job, parts.record),
        data_hook(parts),
        compile_hook(parts),
        scales_hook(parts),
        garbage_hook(parts),
        memory_profile_hook(parts),
        time_profile_hook(parts),  # the last: what others do is not recorded
    ]
    return [hook for hook in built if hook is not None]
