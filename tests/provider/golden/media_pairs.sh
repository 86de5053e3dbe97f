#!/bin/bash
# Preference pairs of clips, weighed by how rare their scores are.
LOAD_PATH="./weights/Wan2.1-T2V-1.3B-Diffusers/transformer/"
GPT_ARGS="
    --micro-batch-size 1 \
    --global-batch-size 1 \
    --lr 1e-5 \
    --min-lr 1e-5 \
    --lr-decay-style constant \
    --weight-decay 1e-2 \
    --lr-warmup-iters 0 \
    --clip-grad 1.0 \
    --train-iters 5000 \
    --load $LOAD_PATH \
    --bf16 \
"
torchrun --nproc_per_node 1 posttrain_sora_dpo.py \
    $GPT_ARGS \
    --mm-data ./media_data.json \
    --mm-model ./media_pairs_model.json \
    --dpo-beta 0.05 \
    --save runs/pairs \
    --distributed-backend nccl \
    2>&1 | tee train.log
