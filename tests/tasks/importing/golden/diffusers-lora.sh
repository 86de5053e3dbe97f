export MODEL_NAME="models/flux"
export INSTANCE_DIR="pictures"
accelerate launch train_dreambooth_lora_flux.py \
  --pretrained_model_name_or_path=$MODEL_NAME --instance_data_dir=$INSTANCE_DIR \
  --instance_prompt="a photo of sks dog" --resolution=32 --train_batch_size=1 --guidance_scale=1 \
  --gradient_accumulation_steps=4 --optimizer="AdamW" --learning_rate=1e-4 --rank=4 --report_to="tensorboard" \
  --lr_scheduler="constant" --lr_warmup_steps=0 --max_train_steps=2 --mixed_precision="bf16" \
  --validation_prompt="A photo of sks dog in a bucket" --validation_epochs=25 --seed="0" --output_dir="runs/di-lora" \
  --push_to_hub
