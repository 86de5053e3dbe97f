#!/usr/bin/env bash
# Encodes clips and captions once for Wan2.1 1.3B, by Megatron-style flags; pretrain_wan2.1_1.3B_flags.sh trains on them.
set -euo pipefail
cd "$(dirname "$0")/../.."

torchrun --nproc_per_node ${NPROC:-8} mindspeed_mm/tools/feature_extraction/get_wan_feature.py --micro-batch-size 1 --num-workers 4 \
    --mm-model examples/wan2.1/model_1.3B.json --mm-data examples/wan2.1/media_1.3B.json \
    --mm-tool examples/wan2.1/tools_1.3B.json "$@"
