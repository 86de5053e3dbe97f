"""Trains Lumina-mGPT by Megatron-style flags: `pretrain_transformers` under the name that scripts have.

`torchrun $DISTRIBUTED_ARGS pretrain_lumina.py $GPT_ARGS $MM_ARGS $OUTPUT_ARGS`.
"""

from __future__ import annotations

from mindspeed_mm.pretrain_transformers import main

if __name__ == "__main__":
    main()
