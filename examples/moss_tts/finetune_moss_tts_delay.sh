#!/usr/bin/env bash
# MOSS-TTS with a delay pattern on the devices of one host (NPROC of them). Arguments go to the trainer:
#   bash examples/moss_tts/finetune_moss_tts_delay.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec torchrun --nproc-per-node "${NPROC:-8}" mindspeed_mm/fsdp/train/trainer.py \
  examples/moss_tts/moss_tts_delay_config.yaml "$@"
