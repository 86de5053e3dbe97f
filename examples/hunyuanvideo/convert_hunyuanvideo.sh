#!/usr/bin/env bash
# Converts HunyuanVideo: the authors' file to MindSpeed-MM's names, divided among TP ranks, to other ranks, and to
# diffusers.
#   bash examples/hunyuanvideo/convert_hunyuanvideo.sh \
#     models/HunyuanVideo/hunyuan-video-t2v-720p/transformers/mp_rank_00_model_states.pt runs/hunyuanvideo
# TP is the number of tensor ranks. An I2V that replaces the first frame has the keys and shapes of T2V: write
# `HunyuanVideoConverter --version i2v` for it, so that diffusers' configuration says so.
set -euo pipefail
SOURCE="${1:?the file of the transformer}" TARGET="${2:?the folder to write into}"

mm-convert HunyuanVideoConverter source_to_mm --cfg.source_path "$SOURCE" \
  --cfg.target_path "$TARGET/mm" --cfg.target_parallel_config.tp_size="${TP:-1}"
mm-convert HunyuanVideoConverter resplit --cfg.source_path "$TARGET/mm" \
  --cfg.target_path "$TARGET/one_rank" --cfg.target_parallel_config.tp_size=1
mm-convert HunyuanVideoConverter mm_to_hf --cfg.source_path "$TARGET/mm" \
  --cfg.target_path "$TARGET/hf"
