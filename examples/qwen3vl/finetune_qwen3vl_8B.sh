#!/usr/bin/env bash
# Qwen3-VL 8B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/qwen3vl/finetune_qwen3vl_8B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/qwen3vl/qwen3vl_8B_config.yaml --nproc "${NPROC:-8}" "$@"
