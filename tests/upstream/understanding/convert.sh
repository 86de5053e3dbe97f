# Hugging Face folder → one file for each of two stages.
mm-convert Qwen2_5_VLConverter hf_to_mm \
  --cfg.mm_dir "ckpt/mm_path/Qwen2.5-VL" \
  --cfg.hf_config.hf_dir "ckpt/hf_path/Qwen2.5-VL" \
  --cfg.parallel_config.llm_pp_layers [[1,1]] \
  --cfg.parallel_config.vit_pp_layers [[2,0]] \
  --cfg.parallel_config.tp_size 1
