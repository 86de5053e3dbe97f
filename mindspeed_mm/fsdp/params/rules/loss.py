"""Rules between the keys of the loss and others."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.argument import Arguments

_CHUNKED = ("features.enable_chunk_loss", "features.enable_dynamic_chunk_loss")
_Z_LOSS, _OFFLOAD = "features.loss_cfg.z_loss_coef", "features.loss_cfg.router_aux_loss_offload"


def loss_problems(arguments: Arguments) -> Iterator[Problem]:
    """Every rule that the loss breaks."""
    features, loss = arguments.features, arguments.features.loss_cfg
    asked = (features.enable_chunk_loss is True, features.enable_dynamic_chunk_loss)
    chunked = [key for key, is_set in zip(_CHUNKED, asked, strict=True) if is_set]
    if loss.loss_type == "raw":
        without_effect = list(chunked)
        if loss.z_loss_coef:
            without_effect.append(_Z_LOSS)
        for key in without_effect:
            yield Problem(
                "applies to the engine's loss, but features.loss_cfg.loss_type is raw: the model's own loss",
                key=key,
                way_out="Leave one of them out.",
            )
    basic = arguments.data.dataset_param.basic_parameters
    if loss.loss_type == "per_micro_batch_loss" and (basic.packing or basic.neat_packing):
        yield Problem(
            "'per_micro_batch_loss' would depend on which samples are packed together",
            key="features.loss_cfg.loss_type",
            way_out="Set it to per_token_loss, or data.dataset_param.basic_parameters.packing to false.",
        )
    output_dtype = arguments.parallel.fsdp_plan.output_dtype
    if chunked and output_dtype not in (None, "fp32"):
        yield Problem(
            f"{output_dtype} would round the loss, which is what the model returns under {chunked[0]}",
            key="parallel.fsdp_plan.output_dtype",
            way_out="Leave it out.",
        )
    if loss.router_aux_loss_offload and not loss.router_aux_loss_coef:
        yield Problem(
            "true, but there is no router loss: features.loss_cfg.router_aux_loss_coef is 0",
            key=_OFFLOAD,
            way_out="Leave it out, or set a coefficient.",
        )
