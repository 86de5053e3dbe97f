#!/usr/bin/env bash
# HunyuanVideo on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/hunyuanvideo/finetune_hunyuanvideo_i2v_13B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

mm extract examples/hunyuanvideo/hunyuanvideo_i2v_13B_config.yaml --nproc "${NPROC:-8}"
exec mm train examples/hunyuanvideo/hunyuanvideo_i2v_13B_config.yaml --nproc "${NPROC:-8}" "$@"
