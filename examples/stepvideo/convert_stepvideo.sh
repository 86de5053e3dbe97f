#!/usr/bin/env bash
# Converts Step-Video: the released folder to the one that trains, and its transformer to MindSpeed-MM's names, divided.
#   bash examples/stepvideo/convert_stepvideo.sh models/stepvideo-t2v-released models/stepvideo-t2v runs/stepvideo-mm
# TP is the number of tensor ranks; PP_LAYERS divides the layers: PP_LAYERS=[24,24]. Without a third folder there is no
# second conversion.
set -euo pipefail
RELEASED="${1:?the released folder}" READY="${2:?the folder to train from}" DIVIDED="${3:-}"

mm-convert StepVideoConverter source_to_hf --cfg.source_path "$RELEASED" --cfg.target_path "$READY"
if [ -n "$DIVIDED" ]; then
  mm-convert StepVideoConverter hf_to_mm --cfg.source_path "$READY/transformer" \
    --cfg.target_path "$DIVIDED" --cfg.target_parallel_config.tp_size "${TP:-1}" \
    --cfg.target_parallel_config.pp_layers "${PP_LAYERS:-[]}"
fi
