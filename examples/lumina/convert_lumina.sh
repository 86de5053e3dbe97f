#!/usr/bin/env bash
# Converts Lumina-mGPT: the Hugging Face folder to MindSpeed-MM's folder, and back.
#   bash examples/lumina/convert_lumina.sh models/Lumina-mGPT-2.0 runs/lumina
set -euo pipefail
SOURCE="${1:?the folder of the model}" TARGET="${2:?the folder to write into}"

mm-convert LuminaConverter hf_to_mm --cfg.source_path "$SOURCE" --cfg.target_path "$TARGET/mm"
mm-convert LuminaConverter mm_to_hf --cfg.source_path "$TARGET/mm" --cfg.target_path "$TARGET/hf" --cfg.hf_dir "$SOURCE"
