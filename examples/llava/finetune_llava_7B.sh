#!/usr/bin/env bash
# LLaVA-1.5 7B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/llava/finetune_llava_7B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/llava/llava_7B_config.yaml --nproc "${NPROC:-8}" "$@"
