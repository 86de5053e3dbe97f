#!/usr/bin/env bash
# A Hugging Face folder divided among the ranks of a Megatron-style trainer, and what they trained as a Hugging Face folder
# again.
#   MODEL=models/Qwen2.5-Omni-7B bash examples/qwen2.5omni/convert_qwen2.5omni.sh
# LLM, VIT and AUDIO are the layers of each tower on the pipeline's stages, one list for each virtual chunk.
# TP is the number of ranks that divide each layer. TRAINED is a checkpoint of the trainer; without it, the one that
# was just written goes back.
set -euo pipefail
MODEL=${MODEL:-models/Qwen2.5-Omni-7B}
MM=${MM:-$MODEL-mm}
OUT=${OUT:-$MODEL-exported}
TRAINED=${TRAINED:-$MM}
LLM=${LLM:-[[11,17]]}
VIT=${VIT:-[[32,0]]}
AUDIO=${AUDIO:-[[32,0]]}
TP=${TP:-1}

mm-convert Qwen2_5_OmniConverter hf_to_mm --cfg.mm_dir "$MM" --cfg.hf_config.hf_dir "$MODEL" \
  --cfg.parallel_config.llm_pp_layers "$LLM" --cfg.parallel_config.vit_pp_layers "$VIT" \
  --cfg.parallel_config.audio_pp_layers "$AUDIO" --cfg.parallel_config.tp_size "$TP"
mm-convert Qwen2_5_OmniConverter mm_to_hf --cfg.mm_dir "$TRAINED" --cfg.hf_config.hf_dir "$MODEL" --cfg.save_hf_dir "$OUT"
