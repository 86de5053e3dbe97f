#!/usr/bin/env bash
# DeepSeek-OCR2 by Megatron-style flags (docs/provider.md), on the 8 devices of one host:
# a copy of the weights on each device, optimizer states shared.
# Further flags win over those below:
#   bash examples/deepseekocr2/finetune_deepseekocr2_3B_flags.sh --lr 5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

NPROC=${NPROC:-8}
NNODES=${NNODES:-1}
MBS=${MBS:-1}
GRAD_ACC_STEP=${GRAD_ACC_STEP:-1}
GBS=$((MBS * GRAD_ACC_STEP * NPROC * NNODES))

DISTRIBUTED_ARGS="
    --nproc_per_node $NPROC \
    --nnodes $NNODES \
    --node_rank ${NODE_RANK:-0} \
    --master_addr ${MASTER_ADDR:-localhost} \
    --master_port ${MASTER_PORT:-6000}
"
GPT_ARGS="
    --micro-batch-size $MBS \
    --global-batch-size $GBS \
    --seq-length 2048 \
    --num-workers 4 \
    --seed 42 \
    --train-iters 2000 \
    --lr 1e-5 \
    --lr-decay-style cosine \
    --lr-warmup-fraction 0.03 \
    --weight-decay 0 \
    --bf16 \
    --use-distributed-optimizer \
    --data-path data/train.jsonl \
    --data-dir data \
    --load models/DeepSeek-OCR-2
"
OUTPUT_ARGS="
    --log-interval 1 \
    --save-interval 500 \
    --save runs/deepseekocr2_3B_flags \
    --ckpt-format torch_dcp
"
torchrun $DISTRIBUTED_ARGS finetune_ocr2.py $GPT_ARGS $OUTPUT_ARGS "$@"
