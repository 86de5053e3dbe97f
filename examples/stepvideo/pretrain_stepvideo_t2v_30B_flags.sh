#!/usr/bin/env bash
# Step-Video-T2V by Megatron-style flags (docs/provider.md), on the 64 devices of 8 hosts, 64 GB each:
# weights, gradients and optimizer states in shards.
# Further flags win over those below:
#   bash examples/stepvideo/pretrain_stepvideo_t2v_30B_flags.sh --lr 5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

NPROC=${NPROC:-8}
NNODES=${NNODES:-8}
TP=${TP:-1}
PP=${PP:-1}
CP=${CP:-1}
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
    --micro-batch-size $MBS \
    --global-batch-size $GBS \
    --num-workers 4 \
    --seed 42 \
    --train-iters 2000 \
    --lr 1e-5 \
    --lr-decay-style cosine \
    --lr-warmup-fraction 0.03 \
    --weight-decay 0 \
    --bf16 \
    --use-torch-fsdp2 \
    --fsdp2-config-path examples/stepvideo/fsdp2_config_30B.yaml
"
MM_ARGS="
    --mm-model examples/stepvideo/model_30B.json \
    --mm-data examples/stepvideo/data_30B.json \
    --mm-tool mindspeed_mm/tools/tools.json
"
OUTPUT_ARGS="
    --log-interval 1 \
    --save-interval 500 \
    --save runs/stepvideo_t2v_30B_flags \
    --ckpt-format torch_dcp
"
torchrun $DISTRIBUTED_ARGS pretrain_sora.py $GPT_ARGS $MM_ARGS $OUTPUT_ARGS "$@"
