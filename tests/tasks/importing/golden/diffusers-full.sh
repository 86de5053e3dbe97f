accelerate launch train_dreambooth_flux.py --pretrained_model_name_or_path=models/flux --instance_data_dir=pictures \
  --instance_prompt="a photo of sks dog" --with_prior_preservation --class_data_dir=others \
  --class_prompt="a photo of a dog" --prior_loss_weight=0.5 --resolution=32 --center_crop --train_batch_size=2 \
  --learning_rate=1e-5 --lr_scheduler=cosine --lr_warmup_steps=1 --max_train_steps=2 --gradient_checkpointing \
  --use_8bit_adam --weighting_scheme=logit_normal --logit_mean=0.5 --output_dir=runs/di-full
