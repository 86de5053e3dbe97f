#!/usr/bin/env bash
# Open-Sora Plan 1.5, text to video, on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/opensoraplan1.5/finetune_opensoraplan_1.5_t2v.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

mm extract examples/opensoraplan1.5/opensoraplan_1.5_t2v_config.yaml --nproc "${NPROC:-8}"
exec mm train examples/opensoraplan1.5/opensoraplan_1.5_t2v_config.yaml --nproc "${NPROC:-8}" "$@"
