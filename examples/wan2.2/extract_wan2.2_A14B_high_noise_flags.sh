#!/usr/bin/env bash
# Encodes clips and captions once for Wan2.2 A14B, text to video, the transformer of much noise alone, by Megatron-style flags; pretrain_wan2.2_A14B_high_noise_flags.sh trains on them.
set -euo pipefail
cd "$(dirname "$0")/../.."

torchrun --nproc_per_node ${NPROC:-8} mindspeed_mm/tools/feature_extraction/get_wan_feature.py --micro-batch-size 1 --num-workers 4 \
    --mm-model examples/wan2.2/model_A14B_high_noise.json --mm-data examples/wan2.2/media_A14B_high_noise.json \
    --mm-tool examples/wan2.2/tools_A14B_high_noise.json "$@"
