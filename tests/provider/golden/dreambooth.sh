#!/bin/bash
# Pictures with captions, with the flags of diffusers' scripts.
python train_dreambooth_flux.py --pretrained_model_name_or_path=models/FLUX.1-dev --dataset_name=rows.jsonl \
    --image_folder=pictures --resolution=512 --train_batch_size=2 --gradient_accumulation_steps=4 \
    --instance_prompt="a cube" --dataloader_num_workers=0 --learning_rate=1e-5 --lr_scheduler=cosine --lr_warmup_steps=10 \
    --max_train_steps=100 --checkpointing_steps=50 \
    --weighting_scheme=logit_normal --mixed_precision=bf16 --gradient_checkpointing --max_grad_norm=1.0 \
    --validation_prompt="a red cube" --validation_epochs=25 --guidance_scale=1 --seed=0 --output_dir=runs/flux
