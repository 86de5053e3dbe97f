#!/usr/bin/env bash
# A Hugging Face folder divided among the ranks of a Megatron-style trainer, and what they trained as a Hugging Face folder
# again.
#   MODEL=models/Qwen2-VL-7B-Instruct bash examples/qwen2vl/convert_qwen2vl.sh
# LLM and VIT are the layers of each tower on the pipeline's stages, one list for each virtual chunk.
# TP is the number of ranks that divide each layer. TRAINED is a checkpoint of the trainer; without it, the one that
# was just written goes back.
set -euo pipefail
MODEL=${MODEL:-models/Qwen2-VL-7B-Instruct}
MM=${MM:-$MODEL-mm}
OUT=${OUT:-$MODEL-exported}
TRAINED=${TRAINED:-$MM}
LLM=${LLM:-[[1,10,10,7]]}
VIT=${VIT:-[[32,0,0,0]]}
TP=${TP:-1}

mm-convert Qwen2VLConverter hf_to_mm --cfg.mm_dir "$MM" --cfg.hf_config.hf_dir "$MODEL" \
  --cfg.parallel_config.llm_pp_layers "$LLM" --cfg.parallel_config.vit_pp_layers "$VIT" \
  --cfg.parallel_config.tp_size "$TP"
mm-convert Qwen2VLConverter mm_to_hf --cfg.mm_dir "$TRAINED" --cfg.hf_config.hf_dir "$MODEL" --cfg.save_hf_dir "$OUT"
