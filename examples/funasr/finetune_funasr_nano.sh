#!/usr/bin/env bash
# Fun-ASR-Nano on the devices of one host (NPROC of them). Arguments go to the trainer:
#   bash examples/funasr/finetune_funasr_nano.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec torchrun --nproc-per-node "${NPROC:-8}" mindspeed_mm/fsdp/tasks/funasr/trainer.py \
  examples/funasr/funasr_nano_config.yaml "$@"
