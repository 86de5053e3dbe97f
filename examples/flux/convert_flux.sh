#!/usr/bin/env bash
# Converts FLUX.1 or FLUX.2: the authors' one file to diffusers' folder, and back.
#   bash examples/flux/convert_flux.sh models/FLUX.1-dev/flux1-dev.safetensors runs/flux
set -euo pipefail
SOURCE="${1:?the file of the authors}" TARGET="${2:?the folder to write into}"

mm-convert GeneratorConverter source_to_hf --cfg.source_path "$SOURCE" --cfg.target_path "$TARGET/hf"
mm-convert GeneratorConverter hf_to_source --cfg.source_path "$TARGET/hf" --cfg.target_path "$TARGET/original"
