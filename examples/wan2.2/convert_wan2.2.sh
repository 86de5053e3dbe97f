#!/usr/bin/env bash
# Converts Wan 2.2: every transformer of a diffusers pipeline (A14B has transformer and transformer_2, for much and for
# little noise) to MindSpeed-MM's names and back, and to the authors' own names.
#   bash examples/wan2.2/convert_wan2.2.sh models/Wan2.2-T2V-A14B-Diffusers runs/wan2.2
# PP_LAYERS divides the layers among pipeline stages: PP_LAYERS=[20,20].
set -euo pipefail
SOURCE="${1:?the folder of the pipeline}" TARGET="${2:?the folder to write into}"

for folder in "$SOURCE"/transformer*/; do
  name="$(basename "$folder")"
  mm-convert WanConverter hf_to_mm --cfg.source_path "$folder" --cfg.target_path "$TARGET/mm/$name" \
    --cfg.target_parallel_config.pp_layers "${PP_LAYERS:-[]}"
  mm-convert WanConverter mm_to_hf --cfg.source_path "$TARGET/mm/$name" --cfg.target_path "$TARGET/hf/$name" \
    --cfg.hf_dir "$folder"
  mm-convert WanConverter hf_to_source --cfg.source_path "$folder" --cfg.target_path "$TARGET/original/$name"
done
