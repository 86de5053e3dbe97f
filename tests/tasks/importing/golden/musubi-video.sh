accelerate launch src/musubi_tuner/wan_train_network.py --task t2v-1.3B --dit models/wan --dataset_config musubi-clips.toml \
  --network_module networks.lora_wan --network_dim 8 --fp8_base --mixed_precision bf16 --gradient_checkpointing \
  --optimizer_type adamw8bit --learning_rate 2e-4 --timestep_sampling shift --discrete_flow_shift 3.0 \
  --max_train_epochs 2 --save_every_n_epochs 1 --seed 42 --output_dir runs --output_name mu-video
