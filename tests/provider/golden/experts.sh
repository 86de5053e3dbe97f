#!/bin/bash
# A mixture of experts: interleaved stages would need no experts on other ranks, so only ring and Ulysses attention here.
torchrun --nproc_per_node=16 pretrain_vlm.py --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall_seq \
    --moe-grouped-gemm --moe-permutation-async-comm --context-parallel-size 4 --context-parallel-algo hybrid_cp_algo \
    --ulysses-degree-in-cp 2 --micro-batch-size 2 --global-batch-size 16 --train-iters 10 --lr 1e-4 --bf16 \
    --optimizer muon --weight-decay-exclude-modules norm --lr-scale-modules router --lr-mult 0.1 \
    --lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-warmup-fraction 0.1 --recompute-granularity selective \
    --recompute-skip-core-attention --swap-attention --finetune --load weights --no-shuffle \
    --trust-remote-code --encoder-dp-balance --mm-data rows_data.json
