#!/bin/bash
# A vision-language model on 8 ranks: two tensor ranks, two stages, one launch as such scripts write it.
source /usr/local/Ascend/cann/set_env.sh
export CUDA_DEVICE_MAX_CONNECTIONS=1

NPUS_PER_NODE=8
NNODES=1
NODE_RANK=0
MASTER_ADDR=localhost
MASTER_PORT=6000
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))

MM_DATA="./data.json"
MM_MODEL="./model.json"
MM_TOOL="./tools.json"
SAVE_PATH="runs/vlm"

TP=2
PP=2
CP=1
MBS=1
GRAD_ACC_STEP=8
DP=$(($WORLD_SIZE/$TP/$PP/$CP))
GBS=$(($MBS*$GRAD_ACC_STEP*$DP))

DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --node_rank $NODE_RANK \
    --master_addr $MASTER_ADDR \
    --master_port $MASTER_PORT
"
# Sizes of the model stand in model.json.
GPT_ARGS="
    --use-mcore-models \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --context-parallel-size ${CP} \
    --context-parallel-algo ulysses_cp_algo \
    --sequence-parallel \
    --micro-batch-size ${MBS} \
    --global-batch-size ${GBS} \
    --tokenizer-type NullTokenizer \
    --vocab-size 152064 \
    --seq-length 1024 \
    --normalization RMSNorm \
    --use-fused-rmsnorm \
    --swiglu \
    --lr 1.0e-5 \
    --min-lr 1.0e-6 \
    --lr-decay-style cosine \
    --lr-warmup-fraction 0.1 \
    --weight-decay 0 \
    --train-iters 10000 \
    --clip-grad 0.0 \
    --seed 42 \
    --bf16 \
    --recompute-granularity full \
    --recompute-method block \
    --recompute-num-layers 4 \
    --use-distributed-optimizer \
    --use-flash-attn \
    --no-load-optim \
    --no-load-rng \
    --num-workers 8 \
    --distributed-timeout-minutes 20
"
MM_ARGS="
    --mm-data $MM_DATA \
    --mm-model $MM_MODEL \
    --mm-tool $MM_TOOL
"
# To let the folder's own code run, add:
# --trust-remote-code \
OUTPUT_ARGS="
    --log-interval 1 \
    --save-interval 500 \
    --eval-interval 100 \
    --eval-iters 5 \
    --save $SAVE_PATH \
    --ckpt-format torch \
    --log-tps
"
logfile=$(date +%Y%m%d)_$(date +%H%M%S)
mkdir -p logs
torchrun $DISTRIBUTED_ARGS pretrain_vlm.py \
    $GPT_ARGS \
    $MM_ARGS \
    $OUTPUT_ARGS \
    --distributed-backend nccl \
    2>&1 | tee logs/train_${logfile}.log
STEP_TIME=`grep "elapsed time per iteration" logs/train_${logfile}.log | awk -F ':' '{print$5}' | awk -F '|' '{print$1}'`
echo "Elapsed Time Per iteration: $STEP_TIME"
