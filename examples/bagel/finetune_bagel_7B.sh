#!/usr/bin/env bash
# BAGEL 7B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/bagel/finetune_bagel_7B.sh training.lr=1e-5
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/bagel/bagel_7B_config.yaml --nproc "${NPROC:-8}" "$@"
