#!/usr/bin/env bash
# Encodes clips and captions once for Step-Video-T2V, by Megatron-style flags; pretrain_stepvideo_t2v_30B_flags.sh trains on them.
set -euo pipefail
cd "$(dirname "$0")/../.."

torchrun --nproc_per_node ${NPROC:-8} mindspeed_mm/tools/feature_extraction/get_sora_feature.py --micro-batch-size 1 --num-workers 4 \
    --mm-model examples/stepvideo/model_30B.json --mm-data examples/stepvideo/media_30B.json \
    --mm-tool examples/stepvideo/tools_30B.json "$@"
