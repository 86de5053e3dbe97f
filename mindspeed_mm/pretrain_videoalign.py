"""Trains VideoAlign's reward model by Megatron-style flags: `pretrain_vlm` under the name that scripts have.

`torchrun $DISTRIBUTED_ARGS pretrain_videoalign.py $GPT_ARGS $MM_ARGS $OUTPUT_ARGS $LORA_ARGS`.
"""

from __future__ import annotations

from mindspeed_mm.pretrain_vlm import main

if __name__ == "__main__":
    main()
