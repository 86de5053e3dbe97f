#!/usr/bin/env bash
# What draws in Ming-Lite-Omni 1.5 on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/ming/finetune_ming_draw_2B.sh training.lr=5e-5
set -euo pipefail
cd "$(dirname "$0")/../.."

mm extract examples/ming/ming_draw_2B_config.yaml --nproc "${NPROC:-8}"
exec mm train examples/ming/ming_draw_2B_config.yaml --nproc "${NPROC:-8}" "$@"
