#!/usr/bin/env bash
# DeepSeek-OCR2 3B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/deepseekocr2/finetune_deepseekocr2_3B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/deepseekocr2/deepseekocr2_3B_config.yaml --nproc "${NPROC:-8}" "$@"
