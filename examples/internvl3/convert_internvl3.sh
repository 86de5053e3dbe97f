#!/usr/bin/env bash
# A Hugging Face folder divided among the ranks of a Megatron-style trainer, and what they trained as a Hugging Face folder
# again.
#   MODEL=models/InternVL3-8B bash examples/internvl3/convert_internvl3.sh
# LLM and VIT are the layers of each tower on the pipeline's stages, one list for each virtual chunk.
# TP is the number of ranks that divide each layer. TRAINED is a checkpoint of the trainer; without it, the one that
# was just written goes back.
set -euo pipefail
MODEL=${MODEL:-models/InternVL3-8B}
MM=${MM:-$MODEL-mm}
OUT=${OUT:-$MODEL-exported}
TRAINED=${TRAINED:-$MM}
LLM=${LLM:-[[13,15]]}
VIT=${VIT:-[[24,0]]}
TP=${TP:-1}

mm-convert InternVLConverter hf_to_mm --cfg.mm_dir "$MM" --cfg.hf_config.hf_dir "$MODEL" \
  --cfg.parallel_config.llm_pp_layers "$LLM" --cfg.parallel_config.vit_pp_layers "$VIT" \
  --cfg.parallel_config.tp_size "$TP"
mm-convert InternVLConverter mm_to_hf --cfg.mm_dir "$TRAINED" --cfg.hf_config.hf_dir "$MODEL" --cfg.save_hf_dir "$OUT"
