#!/usr/bin/env bash
# A Hugging Face folder as a distributed checkpoint to train from, and what was trained as a Hugging Face folder again.
#   MODEL=models/Qwen3-VL-2B-Instruct bash examples/qwen3vl/convert_qwen3vl.sh
# TRAINED is a run folder or a distributed checkpoint; without it, the checkpoint that was just written goes back.
set -euo pipefail
MODEL=${MODEL:-models/Qwen3-VL-2B-Instruct}
DCP=${DCP:-$MODEL-dcp}
OUT=${OUT:-$MODEL-exported}
TRAINED=${TRAINED:-$DCP}

mm-convert Qwen3VLConverter hf_to_dcp --hf_dir "$MODEL" --dcp_dir "$DCP"
mm-convert Qwen3VLConverter dcp_to_hf --load_dir "$TRAINED" --save_dir "$OUT" --model_assets_dir "$MODEL"
