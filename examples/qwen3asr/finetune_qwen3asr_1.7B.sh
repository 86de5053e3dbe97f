#!/usr/bin/env bash
# Qwen3-ASR 1.7B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/qwen3asr/finetune_qwen3asr_1.7B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/qwen3asr/qwen3asr_1.7B_config.yaml --nproc "${NPROC:-8}" "$@"
