#!/bin/bash
# A video generator from extracted features, sharded in groups of four.
GPUS_PER_NODE=8
LOAD_PATH="./weights/Wan2.1-T2V-1.3B-Diffusers/transformer/"
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 1 pretrain_sora.py \
    --micro-batch-size 1 --global-batch-size 8 --num-workers 4 \
    --lr 1e-5 --min-lr 1e-5 --lr-decay-style constant --weight-decay 1e-2 --lr-warmup-init 0 --lr-warmup-iters 0 \
    --train-iters 5000 --bf16 --allow-tf32 \
    --recompute-granularity full --recompute-method block --recompute-num-layers 30 \
    --use-distributed-optimizer --overlap-grad-reduce --layerzero --layerzero-config zero_config.yaml \
    --attention-mask-type general --optimizer-selection fused_ema_adamw \
    --mm-data feature_data.json --mm-model wan_model.json --mm-tool tools.json \
    --log-interval 1 --save-interval 1000 --load $LOAD_PATH --save runs/wan --ckpt-format torch
