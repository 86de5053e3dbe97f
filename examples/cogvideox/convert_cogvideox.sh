#!/usr/bin/env bash
# Converts CogVideoX: the authors' folder (SAT) to MindSpeed-MM's names, divided, and to diffusers.
#   bash examples/cogvideox/convert_cogvideox.sh models/CogVideoX1.5-5B-SAT/transformer_t2v runs/cogvideox
# T2V and I2V are recognised. TP is the number of tensor ranks; PP_LAYERS divides the layers: PP_LAYERS=[10,11,11,10].
set -euo pipefail
SOURCE="${1:?the folder of the transformer}" TARGET="${2:?the folder to write into}"

mm-convert CogVideoConverter source_to_mm --cfg.source_path "$SOURCE" \
  --cfg.target_path "$TARGET/mm" --cfg.target_parallel_config.tp_size "${TP:-1}" \
  --cfg.target_parallel_config.pp_layers "${PP_LAYERS:-[]}"
mm-convert CogVideoConverter mm_to_hf --cfg.source_path "$TARGET/mm" --cfg.target_path "$TARGET/hf"
