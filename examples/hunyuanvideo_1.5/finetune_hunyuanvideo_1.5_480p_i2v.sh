#!/usr/bin/env bash
# HunyuanVideo-1.5 on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/hunyuanvideo_1.5/finetune_hunyuanvideo_1.5_480p_i2v.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

mm extract examples/hunyuanvideo_1.5/hunyuanvideo_1.5_480p_i2v_config.yaml --nproc "${NPROC:-8}"
exec mm train examples/hunyuanvideo_1.5/hunyuanvideo_1.5_480p_i2v_config.yaml --nproc "${NPROC:-8}" "$@"
