#!/usr/bin/env bash
# Wan2.2 5B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/wan2.2/finetune_wan2.2_5B.sh training.lr=5e-5
set -euo pipefail
cd "$(dirname "$0")/../.."

mm extract examples/wan2.2/wan2.2_5B_config.yaml --nproc "${NPROC:-8}"
exec mm train examples/wan2.2/wan2.2_5B_config.yaml --nproc "${NPROC:-8}" "$@"
