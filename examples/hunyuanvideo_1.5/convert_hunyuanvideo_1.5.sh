#!/usr/bin/env bash
# Converts HunyuanVideo 1.5: the authors' folder to diffusers, whose own model is what trains, and back.
#   bash examples/hunyuanvideo_1.5/convert_hunyuanvideo_1.5.sh models/HunyuanVideo-1.5/transformer/480p_t2v runs/hunyuan
set -euo pipefail
SOURCE="${1:?the folder of the transformer}" TARGET="${2:?the folder to write into}"

mm-convert HunyuanVideoConverter source_to_hf --cfg.source_path "$SOURCE" --cfg.target_path "$TARGET/hf"
mm-convert HunyuanVideoConverter hf_to_source --cfg.source_path "$TARGET/hf" --cfg.target_path "$TARGET/original"
