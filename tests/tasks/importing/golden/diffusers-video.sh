accelerate launch train_dreambooth_lora_wan.py --pretrained_model_name_or_path models/wan --instance_data_dir clips \
  --rank 8 --lora_alpha 16 --height 16 --width 16 --max_num_frames 5 --train_batch_size 1 --max_train_steps 2 \
  --learning_rate 1e-4 --lr_scheduler constant --output_dir runs/di-video
