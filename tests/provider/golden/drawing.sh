#!/bin/bash
# Samples of a generator; words behind the script's name are handed on.
LOAD_PATH="weights/Wan2.1-T2V-1.3B-Diffusers/transformer"
GPT_ARGS="
    --micro-batch-size 1 \
    --global-batch-size 1 \
    --num-workers 1 \
    --bf16 \
    --load $LOAD_PATH
"
nohup torchrun --nproc_per_node 1 --nnodes 1 inference_sora.py $GPT_ARGS --mm-model drawing_model.json "$@"
