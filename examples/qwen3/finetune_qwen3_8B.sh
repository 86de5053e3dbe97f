#!/usr/bin/env bash
# Qwen3 8B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/qwen3/finetune_qwen3_8B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/qwen3/qwen3_8B_config.yaml --nproc "${NPROC:-8}" "$@"
