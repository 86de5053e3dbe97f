#!/usr/bin/env bash
# Qwen2-VL 2B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/qwen2vl/finetune_qwen2vl_2B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/qwen2vl/qwen2vl_2B_config.yaml --nproc "${NPROC:-8}" "$@"
