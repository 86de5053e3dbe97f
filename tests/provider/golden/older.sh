#!/bin/bash
# Flags of Megatron-Core and MindSpeed that older scripts have: what the model is, what is logged, how kernels are chosen.
TP=2
DISTRIBUTED_ARGS="--nproc_per_node 8 --nnodes 1 --node_rank 0 --master_addr localhost --master_port 6000"
GPT_ARGS="
    --tensor-model-parallel-size ${TP} \
    --expert-tensor-parallel-size 1 \
    --sequence-parallel \
    --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 \
    --group-query-attention --num-query-groups 4 --add-qkv-bias --disable-bias-linear \
    --use-rotary-position-embeddings --norm-epsilon 1e-6 --init-method-std 0.01 --attention-softmax-in-fp32 \
    --no-bias-gelu-fusion --accumulate-allreduce-grads-in-fp32 --initial-loss-scale 4096 \
    --micro-batch-size 1 --global-batch-size 16 --train-iters 5000 --bf16 \
    --lr 1.0e-5 --min-lr 1.0e-6 --lr-decay-style WSD --lr-wsd-decay-iters 500 --lr-warmup-iters 100 \
    --start-weight-decay 0.1 --end-weight-decay 0.1 --weight-decay-incr-style constant --weight-decay 0.1 \
    --moe-aux-loss-coeff 0.01 --dataloader-type external --split 100,0,0 --manual-gc --manual-gc-interval 50
"
OUTPUT_ARGS="
    --log-interval 1 --save-interval 5000 --save save_dir --load ckpt/mm_path --ckpt-step 200 --use-dist-ckpt \
    --tensorboard-dir tb --log-throughput --enable-one-logger --profile --profile-step-start 4 --profile-step-end 6 \
    --profile-ranks 0 1 --mm-set training.on_nonfinite=skip
"
torchrun $DISTRIBUTED_ARGS pretrain_vlm.py $GPT_ARGS $OUTPUT_ARGS --mm-data rows_data.json --distributed-backend nccl
