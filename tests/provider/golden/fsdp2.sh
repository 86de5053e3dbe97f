#!/bin/bash
# A model of transformers under FSDP2 with Ulysses attention, on two hosts.
NPUS_PER_NODE=8
NNODES=2
FSDP2_PATH="./fsdp2_config.yaml"
CP=2
MBS=1
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
GBS=$(($MBS*4*$WORLD_SIZE/$CP))
HF_PATH='models/Qwen3-VL-8B-Instruct'

if [ ! -f "$HF_PATH/config.json" ]; then
    echo "There is no model." && exit 1
fi

DISTRIBUTED_ARGS="--nproc_per_node $NPUS_PER_NODE --nnodes $NNODES"
GPT_ARGS="
    --context-parallel-size ${CP} \
    --context-parallel-algo ulysses_cp_algo \
    --micro-batch-size ${MBS} \
    --global-batch-size ${GBS} \
    --seq-length 4096 \
    --lr 1.0e-5 \
    --lr-decay-style cosine \
    --lr-warmup-iters 100 \
    --train-iters 1000 \
    --adam-beta2 0.95 \
    --no-gradient-accumulation-fusion \
    --load ckpt/converted \
    --use-torch-fsdp2 \
    --fsdp2-config-path $FSDP2_PATH \
    --untie-embeddings-and-output-weights \
    --optimizer-selection fused_torch_adamw \
    --use-cpu-initialization \
    --calculate-per-sample-loss \
    --init-model-with-meta-device \
    --lora-r 8 \
    --lora-alpha 16 \
    --lora-target-modules linear_qkv linear_proj
"
torchrun $DISTRIBUTED_ARGS pretrain_transformers.py $GPT_ARGS \
    --mm-model transformers_model.json --mm-data rows_data.json --save runs/fsdp2 --ckpt-format torch_dcp
