"""Stands for MindSpeed-MM's entry of this name, whose training is not built."""

from __future__ import annotations

from mindspeed_mm.fsdp.train.provider.entry import run_entry
from mindspeed_mm.provider.launch import refuse_posttraining


def main() -> None:
    """End with a line."""
    run_entry(lambda: refuse_posttraining("posttrain_sora_dpo.py"))


if __name__ == "__main__":
    main()
