#!/usr/bin/env bash
# Encodes clips and captions once for Open-Sora Plan 1.3, text to video, by Megatron-style flags; pretrain_opensoraplan_1.3_flags.sh trains on them.
set -euo pipefail
cd "$(dirname "$0")/../.."

torchrun --nproc_per_node ${NPROC:-8} mindspeed_mm/tools/feature_extraction/get_sora_feature.py --micro-batch-size 1 --num-workers 4 \
    --mm-model examples/opensoraplan1.3/model_1.3.json --mm-data examples/opensoraplan1.3/media_1.3.json \
    --mm-tool examples/opensoraplan1.3/tools_1.3.json "$@"
