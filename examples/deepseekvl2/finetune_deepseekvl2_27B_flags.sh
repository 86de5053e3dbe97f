#!/usr/bin/env bash
# DeepSeek-VL2 27B-A4.5B by Megatron-style flags (docs/provider.md), on 16 devices, 2 hosts:
# two stages of layers, one on each host, the experts over its 8 devices.
# On each host, with its number:
#   MASTER_ADDR=10.0.0.1 NODE_RANK=0 bash examples/deepseekvl2/finetune_deepseekvl2_27B_flags.sh
# Further flags win over those below:
#   bash examples/deepseekvl2/finetune_deepseekvl2_27B_flags.sh --lr 5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

NPROC=${NPROC:-8}
NNODES=${NNODES:-2}
TP=${TP:-1}
PP=${PP:-2}
CP=${CP:-1}
EP=${EP:-8}
MBS=${MBS:-1}
GRAD_ACC_STEP=${GRAD_ACC_STEP:-8}
DP=$((NPROC * NNODES / TP / PP / CP))
GBS=$((MBS * GRAD_ACC_STEP * DP))

DISTRIBUTED_ARGS="
    --nproc_per_node $NPROC \
    --nnodes $NNODES \
    --node_rank ${NODE_RANK:-0} \
    --master_addr ${MASTER_ADDR:-localhost} \
    --master_port ${MASTER_PORT:-6000}
"
GPT_ARGS="
    --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-size $PP \
    --context-parallel-size $CP \
    --expert-model-parallel-size $EP \
    --moe-token-dispatcher-type alltoall \
    --micro-batch-size $MBS \
    --global-batch-size $GBS \
    --seq-length 4096 \
    --num-workers 4 \
    --seed 42 \
    --train-iters 2000 \
    --lr 1e-5 \
    --lr-decay-style cosine \
    --lr-warmup-fraction 0.03 \
    --weight-decay 0 \
    --bf16 \
    --use-distributed-optimizer \
    --recompute-granularity full \
    --recompute-method uniform \
    --recompute-num-layers 1
"
MM_ARGS="
    --mm-model examples/deepseekvl2/model_27B.json \
    --mm-data examples/deepseekvl2/data_27B.json \
    --mm-tool mindspeed_mm/tools/tools.json
"
OUTPUT_ARGS="
    --log-interval 1 \
    --save-interval 500 \
    --save runs/deepseekvl2_27B_flags \
    --ckpt-format torch_dcp
"
torchrun $DISTRIBUTED_ARGS pretrain_deepseekvl.py $GPT_ARGS $MM_ARGS $OUTPUT_ARGS "$@"
