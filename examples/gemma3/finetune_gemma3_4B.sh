#!/usr/bin/env bash
# Gemma 3 4B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/gemma3/finetune_gemma3_4B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/gemma3/gemma3_4B_config.yaml --nproc "${NPROC:-8}" "$@"
