#!/bin/bash
# The script of Ming, which trains the language model alone.
GBS=8
MODEL_ARGS="
    --num-workers 8 \
    --seed 1234 \
    --no-shuffle \
    --seq-length 2048 \
    --micro-batch-size 1 \
    --global-batch-size $GBS \
    --train-iters 1000 \
    --lr 5e-6 \
    --clip-grad 0 \
    --warmup-ratio 0 \
    --weight-decay 1e-2 \
    --data-path ./data/rows.jsonl \
    --data-dir ./data \
    --processor-path ./Ming \
    --load ./ckpt/Ming-Lite-Omni-1.5 \
    --save runs/ming
"
torchrun --nproc_per_node 8 finetune_vl.py \
    $MODEL_ARGS \
    2>&1 | tee logs/train.log
