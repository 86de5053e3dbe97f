#!/usr/bin/env bash
# Converts VACE: diffusers' folder to MindSpeed-MM's names and back, and to the authors' own names.
#   bash examples/vace/convert_vace.sh models/Wan2.1-VACE-1.3B-diffusers/transformer runs/vace
set -euo pipefail
SOURCE="${1:?the folder of the transformer}" TARGET="${2:?the folder to write into}"

mm-convert VACEConverter hf_to_mm --cfg.source_path "$SOURCE" --cfg.target_path "$TARGET/mm"
mm-convert VACEConverter mm_to_hf --cfg.source_path "$TARGET/mm" --cfg.target_path "$TARGET/hf" --cfg.hf_dir "$SOURCE"
mm-convert VACEConverter hf_to_source --cfg.source_path "$SOURCE" --cfg.target_path "$TARGET/original"
