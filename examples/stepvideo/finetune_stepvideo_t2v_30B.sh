#!/usr/bin/env bash
# Step-Video-T2V on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/stepvideo/finetune_stepvideo_t2v_30B.sh training.lr=5e-5
set -euo pipefail
cd "$(dirname "$0")/../.."

mm extract examples/stepvideo/stepvideo_t2v_30B_config.yaml --nproc "${NPROC:-8}"
exec mm train examples/stepvideo/stepvideo_t2v_30B_config.yaml --nproc "${NPROC:-8}" "$@"
