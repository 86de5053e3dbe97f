#!/usr/bin/env bash
# Qwen3-VL 8B by Megatron-style flags (docs/provider.md), on the 8 devices of one host:
# sharded; four devices share a row by its heads.
# Further flags win over those below:
#   bash examples/qwen3vl/finetune_qwen3vl_8B_flags.sh --lr 5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

NPROC=${NPROC:-8}
NNODES=${NNODES:-1}
TP=${TP:-1}
PP=${PP:-1}
CP=${CP:-4}
MBS=${MBS:-1}
GRAD_ACC_STEP=${GRAD_ACC_STEP:-1}
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
    --context-parallel-algo ulysses_cp_algo \
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
    --use-torch-fsdp2 \
    --fsdp2-config-path examples/qwen3vl/fsdp2_config_8B.yaml
"
MM_ARGS="
    --mm-model examples/qwen3vl/model_8B.json \
    --mm-data examples/qwen3vl/data_8B.json \
    --mm-tool mindspeed_mm/tools/tools.json
"
OUTPUT_ARGS="
    --log-interval 1 \
    --save-interval 500 \
    --save runs/qwen3vl_8B_flags \
    --ckpt-format torch_dcp
"
torchrun $DISTRIBUTED_ARGS pretrain_transformers.py $GPT_ARGS $MM_ARGS $OUTPUT_ARGS "$@"
