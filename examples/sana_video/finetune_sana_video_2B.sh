#!/usr/bin/env bash
# SANA-Video 2B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/sana_video/finetune_sana_video_2B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

mm extract examples/sana_video/sana_video_2B_config.yaml --nproc "${NPROC:-8}"
exec mm train examples/sana_video/sana_video_2B_config.yaml --nproc "${NPROC:-8}" "$@"
