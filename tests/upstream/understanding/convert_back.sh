# What was trained → a Hugging Face folder.
mm-convert Qwen2_5_VLConverter mm_to_hf \
  --cfg.save_hf_dir "ckpt/mm_to_hf/Qwen2.5-VL" \
  --cfg.mm_dir "save_dir" \
  --cfg.hf_config.hf_dir "ckpt/hf_path/Qwen2.5-VL" \
  --cfg.parallel_config.llm_pp_layers [1,1] \
  --cfg.parallel_config.vit_pp_layers [2,0] \
  --cfg.parallel_config.tp_size 1
