"""Trains Qwen3.5 by one YAML with flags, data and model: `pretrain_transformers` under the name that scripts have.

`torchrun $DISTRIBUTED_ARGS mindspeed_mm/mcore/models/qwen3_5/pretrain_qwen3_5.py run.yaml`.
"""

from __future__ import annotations

from mindspeed_mm.pretrain_transformers import main

if __name__ == "__main__":
    main()
