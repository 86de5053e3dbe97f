"""Trains FLUX.1 on rewards of its pictures by the flags of MindSpeed-MM's entry of this name (DanceGRPO).

`torchrun $DISTRIBUTED_ARGS posttrain_flux_dancegrpo.py $GPT_ARGS $MM_ARGS $OUTPUT_ARGS $GRPO_ARGS`.
"""

from __future__ import annotations

import sys

from mindspeed_mm.fsdp.train.provider.entry import run_entry
from mindspeed_mm.tasks.dancegrpo import run


def main() -> None:
    """Train as the flags say."""
    run_entry(lambda: run.run(sys.argv[1:]))


if __name__ == "__main__":
    main()
