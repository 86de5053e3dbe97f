trl dpo --model_name_or_path models/text --dataset_name data/pairs.jsonl --beta 0.3 --loss_type hinge \
    --learning_rate 5.0e-7 --num_train_epochs 1 --per_device_train_batch_size 1 --gradient_accumulation_steps 4 \
    --output_dir runs/trl-dpo --no_remove_unused_columns
