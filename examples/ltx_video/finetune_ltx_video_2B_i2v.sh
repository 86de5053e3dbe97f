#!/usr/bin/env bash
# LTX-Video 2B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/ltx_video/finetune_ltx_video_2B_i2v.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

mm extract examples/ltx_video/ltx_video_2B_i2v_config.yaml --nproc "${NPROC:-8}"
exec mm train examples/ltx_video/ltx_video_2B_i2v_config.yaml --nproc "${NPROC:-8}" "$@"
