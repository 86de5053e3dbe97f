#!/usr/bin/env bash
# DeepSeek-OCR 3B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/deepseekocr/finetune_deepseekocr_3B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/deepseekocr/deepseekocr_3B_config.yaml --nproc "${NPROC:-8}" "$@"
