#!/usr/bin/env bash
# Stable Diffusion 3.5 large on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/sd3/finetune_sd3_3.5_large.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

mm extract examples/sd3/sd3_3.5_large_config.yaml --nproc "${NPROC:-8}"
exec mm train examples/sd3/sd3_3.5_large_config.yaml --nproc "${NPROC:-8}" "$@"
