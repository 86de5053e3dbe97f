"""Trains DeepSeek-OCR2 by flags alone: `pretrain_transformers` under the name that scripts have.

`torchrun $DISTRIBUTED_ARGS finetune_ocr2.py --load FOLDER --data-path ROWS …`.
"""

from __future__ import annotations

from mindspeed_mm.pretrain_transformers import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
