#!/usr/bin/env bash
# Llama 3.1 8B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/llama3.1/finetune_llama3.1_8B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/llama3.1/llama3.1_8B_config.yaml --nproc "${NPROC:-8}" "$@"
