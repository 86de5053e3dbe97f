swift rlhf --rlhf_type dpo --model models/text --dataset data/pairs.jsonl --tuner_type lora --beta 0.2 \
    --rpo_alpha 0.1 --max_length 256 --learning_rate 5e-5 --num_train_epochs 1 --gradient_accumulation_steps 2 \
    --output_dir output/dpo --system "You are helpful."
