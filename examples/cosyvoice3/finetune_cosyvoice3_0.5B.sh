#!/usr/bin/env bash
# CosyVoice3's language model on the devices of one host (NPROC of them). Arguments go to the trainer:
#   bash examples/cosyvoice3/finetune_cosyvoice3_0.5B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec torchrun --nproc-per-node "${NPROC:-8}" mindspeed_mm/fsdp/tasks/cosyvoice3/train.py \
  examples/cosyvoice3/cosyvoice3_0.5B_config.yaml "$@"
