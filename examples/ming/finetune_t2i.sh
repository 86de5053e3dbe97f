#!/usr/bin/env bash
# What draws in Ming-Lite-Omni 1.5 by the flags of MindSpeed-MM's own script (docs/provider.md), on the 8 devices of one host.
# Further flags win over those below:
#   bash examples/ming/finetune_t2i.sh --learning_rate 5e-5
set -euo pipefail
cd "$(dirname "$0")/../.."

DISTRIBUTED_ARGS="
    --nproc_per_node ${NPROC:-8} \
    --nnodes ${NNODES:-1} \
    --node_rank ${NODE_RANK:-0} \
    --master_addr ${MASTER_ADDR:-localhost} \
    --master_port ${MASTER_PORT:-60010}
"
MODEL_ARGS="
    --pretrained_model_name_or_path models/Ming-Lite-Omni-1.5 \
    --json_path data/data_new.jsonl \
    --image_folder data/images \
    --resolution 512 512 \
    --micro_batch_size 1 \
    --dataloader_num_workers 8 \
    --seed 1234 \
    --checkpointing_steps 500 \
    --max_train_steps 100000 \
    --learning_rate 1e-4 \
    --lr_warmup_steps 50 \
    --clip_grad 0.0 \
    --lr_scheduler constant_with_warmup \
    --weight_decay 1e-2 \
    --weighting_scheme logit_normal \
    --output_dir runs/ming_t2i
"
exec torchrun $DISTRIBUTED_ARGS finetune_t2i.py $MODEL_ARGS "$@"
