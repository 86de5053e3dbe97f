#!/usr/bin/env bash
# Encodes clips and captions once for HunyuanVideo, text to video, by Megatron-style flags; pretrain_hunyuanvideo_13B_flags.sh trains on them.
set -euo pipefail
cd "$(dirname "$0")/../.."

torchrun --nproc_per_node ${NPROC:-8} mindspeed_mm/tools/feature_extraction/get_hunyuan_feature.py --micro-batch-size 1 --num-workers 4 \
    --mm-model examples/hunyuanvideo/model_13B.json --mm-data examples/hunyuanvideo/media_13B.json \
    --mm-tool examples/hunyuanvideo/tools_13B.json "$@"
