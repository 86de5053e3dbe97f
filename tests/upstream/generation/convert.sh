# diffusers' transformer → MindSpeed-MM's names, in place.
mm-convert WanConverter hf_to_mm \
  --cfg.source_path ./weights/Wan-AI/Wan2.1-T2V-Diffusers/transformer/ \
  --cfg.target_path ./weights/Wan-AI/Wan2.1-T2V-Diffusers/transformer/ \
  --cfg.target_parallel_config.pp_layers []
