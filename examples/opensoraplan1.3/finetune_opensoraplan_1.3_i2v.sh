#!/usr/bin/env bash
# Open-Sora Plan 1.3, image to video, on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/opensoraplan1.3/finetune_opensoraplan_1.3_i2v.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

mm extract examples/opensoraplan1.3/opensoraplan_1.3_i2v_config.yaml --nproc "${NPROC:-8}"
exec mm train examples/opensoraplan1.3/opensoraplan_1.3_i2v_config.yaml --nproc "${NPROC:-8}" "$@"
