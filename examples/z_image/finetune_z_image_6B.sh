#!/usr/bin/env bash
# Z-Image on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/z_image/finetune_z_image_6B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

mm extract examples/z_image/z_image_6B_config.yaml --nproc "${NPROC:-8}"
exec mm train examples/z_image/z_image_6B_config.yaml --nproc "${NPROC:-8}" "$@"
