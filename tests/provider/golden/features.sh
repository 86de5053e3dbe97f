#!/bin/bash
# Features of clips for Wan, encoded on two ranks.
NPUS_PER_NODE=2
DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes 1
"
MM_ARGS="
    --mm-data ./media_data.json \
    --mm-model ./encoders_model.json \
    --mm-tool ./tools.json
"
torchrun $DISTRIBUTED_ARGS ./mindspeed_mm/tools/feature_extraction/get_wan_feature.py \
    --tensor-model-parallel-size 1 --micro-batch-size 1 --global-batch-size 2 --num-workers 8 \
    $MM_ARGS --distributed-backend nccl | tee logs/features.log 2>&1
