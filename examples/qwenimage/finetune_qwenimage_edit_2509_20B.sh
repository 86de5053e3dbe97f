#!/usr/bin/env bash
# Qwen-Image-Edit-2509 on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/qwenimage/finetune_qwenimage_edit_2509_20B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

mm extract examples/qwenimage/qwenimage_edit_2509_20B_config.yaml --nproc "${NPROC:-8}"
exec mm train examples/qwenimage/qwenimage_edit_2509_20B_config.yaml --nproc "${NPROC:-8}" "$@"
