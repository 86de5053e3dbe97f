#!/usr/bin/env bash
# Encodes clips and captions once for HunyuanVideo-1.5 480p, text to video, by Megatron-style flags; pretrain_hunyuanvideo_1.5_480p_flags.sh trains on them.
set -euo pipefail
cd "$(dirname "$0")/../.."

torchrun --nproc_per_node ${NPROC:-8} mindspeed_mm/tools/feature_extraction/get_hunyuan_feature.py --micro-batch-size 1 --num-workers 4 \
    --mm-model examples/hunyuanvideo_1.5/model_480p.json --mm-data examples/hunyuanvideo_1.5/media_480p.json \
    --mm-tool examples/hunyuanvideo_1.5/tools_480p.json "$@"
