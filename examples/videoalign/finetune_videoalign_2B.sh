#!/usr/bin/env bash
# VideoAlign's reward model on the devices of one host (NPROC of them). Arguments go to the trainer:
#   bash examples/videoalign/finetune_videoalign_2B.sh training.lr=1e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec torchrun --nproc-per-node "${NPROC:-2}" mindspeed_mm/fsdp/train/trainer.py \
  examples/videoalign/videoalign_2B_config.yaml "$@"
