# What was trained → a folder of diffusers.
mm-convert WanConverter mm_to_hf \
  --cfg.source_path ./saved_ckpt/ \
  --cfg.target_path ./converted_weights/Wan-AI/Wan2.1-T2V-Diffusers/transformer/ \
  --cfg.hf_dir ./weights/Wan-AI/Wan2.1-T2V-Diffusers/transformer/
