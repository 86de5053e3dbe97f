#!/usr/bin/env bash
# Step3-VL-10B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/step3_vl/finetune_step3_vl_10b.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/step3_vl/step3_vl_10b_config.yaml --nproc "${NPROC:-8}" "$@"
