"""Trains generators of pictures and clips on preference pairs by Megatron-style flags.

`torchrun $DISTRIBUTED_ARGS posttrain_sora_dpo.py $GPT_ARGS $MM_ARGS $OUTPUT_ARGS $DPO_ARGS`."""

from __future__ import annotations

from mindspeed_mm.fsdp.train.provider.entry import run_entry
from mindspeed_mm.pretrain_sora import model_provider
from mindspeed_mm.training import forward_step, pretrain, train_valid_test_datasets_provider


def main() -> None:
    """Train as the flags say."""
    run_entry(
        lambda: pretrain(
            train_valid_test_datasets_provider,
            model_provider,
            None,
            forward_step,
            args_defaults={"posttrain_method": "dpo"},
        )
    )


if __name__ == "__main__":
    main()
