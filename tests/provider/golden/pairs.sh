#!/bin/bash
# Preference pairs with adapters, as the scripts of Qwen2-VL have them.
LOAD_PATH="ckpt/Qwen2-VL"
GPT_ARGS="
    --micro-batch-size 1 \
    --global-batch-size 8 \
    --seq-length 1024 \
    --lr 5.0e-6 \
    --lr-decay-style cosine \
    --weight-decay 0 \
    --train-iters 5000 \
    --lr-warmup-fraction 0.1 \
    --clip-grad 0.0 \
    --seed 42 \
    --bf16 \
    --load $LOAD_PATH \
"
DPO_ARGS="
    --dpo-beta 0.1 \
    --dpo-loss-type sigmoid \
    --dpo-label-smoothing 0.0 \
    --pref-ftx 0.0 \
    --ref-model $LOAD_PATH \
"
torchrun --nproc_per_node 1 posttrain_qwen2vl_dpo.py \
    $GPT_ARGS \
    $DPO_ARGS \
    --mm-data ./data.json \
    --mm-model ./model.json \
    --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2 \
    2>&1 | tee train.log
