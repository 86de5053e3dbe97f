#!/usr/bin/env bash
# Ming-Lite-Omni 1.5 by the flags of MindSpeed-MM's own script (docs/provider.md), on the 8 devices of one host: FSDP2, bf16,
# the language model alone.
# Further flags win over those below:
#   bash examples/ming/finetune_ming_18B_flags.sh --lr 1e-5
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
MODEL_ARGS="
    --num-workers 4 \
    --seed 1234 \
    --no-shuffle \
    --seq-length 2048 \
    --micro-batch-size $MBS \
    --global-batch-size $GBS \
    --train-iters 1000 \
    --lr 5e-6 \
    --clip-grad 0 \
    --warmup-ratio 0 \
    --weight-decay 1e-2 \
    --data-path data/train.jsonl \
    --data-dir data \
    --processor-path models/Ming-Lite-Omni-1.5 \
    --load models/Ming-Lite-Omni-1.5
"
OUTPUT_ARGS="
    --log-interval 1 \
    --save-interval 500 \
    --save runs/ming_18B_flags \
    --ckpt-format torch_dcp
"
torchrun $DISTRIBUTED_ARGS finetune_vl.py $MODEL_ARGS $OUTPUT_ARGS "$@"
