#!/usr/bin/env bash
# CogVideoX 5B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/cogvideox/finetune_cogvideox_5B_i2v.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

mm extract examples/cogvideox/cogvideox_5B_i2v_config.yaml --nproc "${NPROC:-8}"
exec mm train examples/cogvideox/cogvideox_5B_i2v_config.yaml --nproc "${NPROC:-8}" "$@"
