#!/usr/bin/env bash
# A Hugging Face folder as a distributed checkpoint to train from, and what was trained as a Hugging Face folder again.
#   MODEL=models/Mistral-Small-3.1-24B-Instruct-2503 bash examples/mistral3/convert_mistral3.sh
# TRAINED is a run folder or a distributed checkpoint; without it, the checkpoint that was just written goes back.
set -euo pipefail
MODEL=${MODEL:-models/Mistral-Small-3.1-24B-Instruct-2503}
DCP=${DCP:-$MODEL-dcp}
OUT=${OUT:-$MODEL-exported}
TRAINED=${TRAINED:-$DCP}

mm-convert Mistral3Converter hf_to_dcp --hf_dir "$MODEL" --dcp_dir "$DCP"
mm-convert Mistral3Converter dcp_to_hf --load_dir "$TRAINED" --save_dir "$OUT" --model_assets_dir "$MODEL"
