#!/usr/bin/env bash
# A Hugging Face folder divided among the ranks of a Megatron-style trainer, and what they trained as a Hugging Face folder
# again.
#   MODEL=models/Qwen3-VL-30B-A3B-Instruct bash examples/qwen3vl/convert_qwen3vl_megatron.sh
# LLM and VIT are the layers of each tower on the pipeline's stages, one list for each virtual chunk.
# TP is the number of ranks that divide each layer, EP of those that divide the experts. TRAINED is a checkpoint of the trainer; without it, the one that
# was just written goes back.
set -euo pipefail
MODEL=${MODEL:-models/Qwen3-VL-30B-A3B-Instruct}
MM=${MM:-$MODEL-mm}
OUT=${OUT:-$MODEL-exported}
TRAINED=${TRAINED:-$MM}
LLM=${LLM:-[[6,14,14,14]]}
VIT=${VIT:-[[27,0,0,0]]}
TP=${TP:-1}
EP=${EP:-2}

mm-convert Qwen3VLMegatronConverter hf_to_mm --cfg.mm_dir "$MM" --cfg.hf_config.hf_dir "$MODEL" \
  --cfg.parallel_config.llm_pp_layers "$LLM" --cfg.parallel_config.vit_pp_layers "$VIT" \
  --cfg.parallel_config.tp_size "$TP" --cfg.parallel_config.ep_size "$EP"
mm-convert Qwen3VLMegatronConverter mm_to_hf --cfg.mm_dir "$TRAINED" --cfg.hf_config.hf_dir "$MODEL" --cfg.save_hf_dir "$OUT"
