accelerate launch --mixed_precision bf16 --num_cpu_threads_per_process 1 flux_train.py \
  --pretrained_model_name_or_path models/flux.safetensors --clip_l clip_l.safetensors --t5xxl t5xxl.safetensors \
  --train_data_dir pictures --resolution 32 --train_batch_size 1 --max_train_steps 2 --learning_rate 5e-5 \
  --timestep_sampling sigmoid --model_prediction_type raw --output_dir runs/ko-full --xformers --flip_aug --random_crop
