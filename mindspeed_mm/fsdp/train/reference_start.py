"""What a frozen reference is built of."""

from __future__ import annotations

from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.lora_args import LoraArguments


def reference_start(arguments: Arguments) -> Arguments:
    """The configuration of the policy, as that of its reference."""
    folder = arguments.posttrain.reference.model_name_or_path
    given = {"model_name_or_path": folder} if folder else {}
    lora = arguments.training.lora
    if folder or not (lora.pretrained_lora_path or lora.frozen_adapters or lora.quantize):
        lora = LoraArguments()  # what it starts with adds nothing to the model
    return arguments.model_copy(
        update={
            "model": arguments.model.model_copy(update=given),
            "training": arguments.training.model_copy(update={"lora": lora}),
        }
    )
