#!/usr/bin/env bash
# InternVL2.5 4B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/internvl2.5/finetune_internvl2.5_4B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/internvl2.5/internvl2.5_4B_config.yaml --nproc "${NPROC:-8}" "$@"
