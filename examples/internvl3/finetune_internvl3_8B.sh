#!/usr/bin/env bash
# InternVL3 8B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/internvl3/finetune_internvl3_8B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/internvl3/internvl3_8B_config.yaml --nproc "${NPROC:-8}" "$@"
