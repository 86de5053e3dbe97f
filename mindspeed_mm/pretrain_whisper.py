"""Trains Whisper by Megatron-style flags.

`torchrun $DISTRIBUTED_ARGS pretrain_whisper.py $GPT_ARGS $MM_ARGS $OUTPUT_ARGS`.
A copy of this script takes functions of your own."""

from __future__ import annotations

from mindspeed_mm.fsdp.train.provider.entry import run_entry
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.training import forward_step, get_args, pretrain, train_valid_test_datasets_provider


def model_provider(pre_process: bool = True, post_process: bool = True) -> TransformersModel:
    """The whole model that the flags name; stages are made of it."""
    return TransformersModel(get_args().mm.model)


def main() -> None:
    """Train as the flags say."""
    run_entry(lambda: pretrain(train_valid_test_datasets_provider, model_provider, None, forward_step))


if __name__ == "__main__":
    main()
