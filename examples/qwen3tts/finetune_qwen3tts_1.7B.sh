#!/usr/bin/env bash
# Qwen3-TTS on the devices of one host (NPROC of them). Arguments go to the trainer:
#   bash examples/qwen3tts/finetune_qwen3tts_1.7B.sh training.lr=1e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec torchrun --nproc-per-node "${NPROC:-8}" mindspeed_mm/fsdp/train/trainer.py \
  examples/qwen3tts/qwen3tts_1.7B_config.yaml "$@"
