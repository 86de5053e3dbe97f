#!/usr/bin/env bash
# InternVL-U 4B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/internvlu/finetune_internvlu_4B.sh training.lr=1e-5
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/internvlu/internvlu_4B_config.yaml --nproc "${NPROC:-8}" "$@"
