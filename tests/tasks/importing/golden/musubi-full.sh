accelerate launch src/musubi_tuner/qwen_image_train.py --dit models/flux.safetensors --dataset_config musubi-data.toml \
  --mixed_precision bf16 --full_bf16 --optimizer_type adamw --learning_rate 1e-5 --max_train_steps 2 \
  --timestep_sampling shift --discrete_flow_shift 2.2 --output_dir runs/mu-full --sdpa
