# all weights of a vision-language model but its tower
NPROC_PER_NODE=1 \
MAX_PIXELS=262144 \
swift sft \
    --model models/vl \
    --dataset data/rows.jsonl#20 \
    --tuner_type full \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --learning_rate 1e-5 \
    --freeze_vit true \
    --gradient_accumulation_steps 4 \
    --max_length 512 \
    --save_steps 100 --save_total_limit 2 --logging_steps 5 \
    --output_dir output/vl \
    --warmup_ratio 0.05 \
    --dataloader_num_workers 2
