#!/bin/bash
# Interleaved stages without a model file, for a provider of your own.
STAGES=2
python3 -m torch.distributed.run --nproc_per_node 4 --nnodes 1 pretrain_vlm.py \
    --pipeline-model-parallel-size $STAGES --virtual-pipeline-model-parallel-size 2 --micro-batch-size 1 \
    --global-batch-size 8 --train-iters 10 --lr 1e-4 --fp16 --ai-framework pytorch --save "runs/with space" \
    --data-path rows.json
