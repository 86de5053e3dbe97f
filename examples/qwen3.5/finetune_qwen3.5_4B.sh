#!/usr/bin/env bash
# Qwen3.5 4B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/qwen3.5/finetune_qwen3.5_4B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/qwen3.5/qwen3.5_4B_config.yaml --nproc "${NPROC:-8}" "$@"
