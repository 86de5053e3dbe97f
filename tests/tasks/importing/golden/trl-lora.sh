accelerate launch --config_file zero2.yaml examples/scripts/sft.py \
    --model_name_or_path models/vl --dataset_name data/rows.jsonl --use_peft --lora_r 8 --lora_alpha 16 \
    --lora_target_modules all-linear --learning_rate 2.0e-4 --max_steps 2 --warmup_steps 1 \
    --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --output_dir runs/trl-lora --bf16 True
