#!/usr/bin/env bash
# Encodes clips and captions once for CogVideoX 1.5 5B, text to video, by Megatron-style flags; pretrain_cogvideox_1.5_5B_flags.sh trains on them.
set -euo pipefail
cd "$(dirname "$0")/../.."

torchrun --nproc_per_node ${NPROC:-8} mindspeed_mm/tools/feature_extraction/get_sora_feature.py --micro-batch-size 1 --num-workers 4 \
    --mm-model examples/cogvideox/model_1.5_5B.json --mm-data examples/cogvideox/media_1.5_5B.json \
    --mm-tool examples/cogvideox/tools_1.5_5B.json "$@"
