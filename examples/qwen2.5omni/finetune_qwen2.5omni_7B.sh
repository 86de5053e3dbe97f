#!/usr/bin/env bash
# Qwen2.5-Omni 7B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/qwen2.5omni/finetune_qwen2.5omni_7B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/qwen2.5omni/qwen2.5omni_7B_config.yaml --nproc "${NPROC:-8}" "$@"
