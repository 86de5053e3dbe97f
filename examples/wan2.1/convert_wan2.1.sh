#!/usr/bin/env bash
# Converts Wan 2.1: diffusers' folder to MindSpeed-MM's names and back, and to the authors' own names.
#   bash examples/wan2.1/convert_wan2.1.sh models/Wan2.1-T2V-1.3B-Diffusers/transformer runs/wan2.1
# PP_LAYERS divides the layers among pipeline stages: PP_LAYERS=[15,15]. Weights of the authors (Wan2.1-T2V-1.3B)
# take source_to_mm in place of hf_to_mm, and source_to_hf in place of hf_to_source.
set -euo pipefail
SOURCE="${1:?the folder of the transformer}" TARGET="${2:?the folder to write into}"

mm-convert WanConverter hf_to_mm --cfg.source_path "$SOURCE" --cfg.target_path "$TARGET/mm" \
  --cfg.target_parallel_config.pp_layers "${PP_LAYERS:-[]}"
mm-convert WanConverter mm_to_hf --cfg.source_path "$TARGET/mm" --cfg.target_path "$TARGET/hf" --cfg.hf_dir "$SOURCE"
mm-convert WanConverter hf_to_source --cfg.source_path "$SOURCE" --cfg.target_path "$TARGET/original"
