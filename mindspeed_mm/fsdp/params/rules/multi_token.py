"""What must hold between `model.mtp_num_layers` and all other keys."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.argument import Arguments

KEY = "model.mtp_num_layers"


def multi_token_problems(arguments: Arguments) -> Iterator[Problem]:
    """What does not go with heads for further tokens; nothing where there are none."""
    depths = arguments.model.mtp_num_layers
    if not depths:
        return
    parallel = arguments.parallel
    reasons = {
        "parallel.pipeline_parallel_size": (parallel.pipeline_parallel_size > 1, "the heads need both ends of a model"),
        "parallel.tensor_parallel_size": (parallel.tensor_parallel_size > 1, "the heads' layers have no plan for it"),
        "parallel.ring_attention_size": (parallel.ring_attention_size > 1, "the next token may be another rank's"),
        "parallel.ulysses_parallel_size": (parallel.ulysses_parallel_size > 1, "the next token may be another rank's"),
        "training.lora.enable": (arguments.training.lora.enable, "the heads are trained whole"),
        "features.loss_cfg.loss_type": (
            arguments.features.loss_cfg.loss_type == "raw", "the model's own loss does not include them"
        ),
    }  # fmt: skip
    for key, (is_set, reason) in reasons.items():
        if is_set:
            way_out = f"Leave it out, or set {KEY} to 0."
            yield Problem(f"cannot be combined with {KEY}, {depths}: {reason}", key=key, way_out=way_out)
