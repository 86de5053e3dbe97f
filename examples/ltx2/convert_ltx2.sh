#!/usr/bin/env bash
# Converts LTX-2 (LTX-Video too): the transformer in the authors' one file to diffusers' folder, and back.
#   bash examples/ltx2/convert_ltx2.sh models/LTX-2/ltx-2-19b-dev.safetensors runs/ltx2
set -euo pipefail
SOURCE="${1:?the file of the authors}" TARGET="${2:?the folder to write into}"

mm-convert GeneratorConverter source_to_hf --cfg.source_path "$SOURCE" --cfg.target_path "$TARGET/hf"
mm-convert GeneratorConverter hf_to_source --cfg.source_path "$TARGET/hf" --cfg.target_path "$TARGET/original"
