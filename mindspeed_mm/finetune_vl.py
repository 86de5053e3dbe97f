"""Trains Ming-Lite-Omni, or another vision-language model, by flags alone: `pretrain_transformers` under the name that
scripts have.

`torchrun $DISTRIBUTED_ARGS finetune_vl.py --load FOLDER --data-path ROWS …`.
"""

from __future__ import annotations

from mindspeed_mm.pretrain_transformers import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
