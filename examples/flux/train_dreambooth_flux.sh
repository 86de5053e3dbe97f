#!/usr/bin/env bash
# FLUX.1 dev learns what one dog looks like, and keeps what dogs in general look like. Further flags of diffusers' script:
#   bash examples/flux/train_dreambooth_flux.sh --max_train_steps 200
set -euo pipefail
cd "$(dirname "$0")/../.."

# Adapters; without --rank all weights. Pictures of the class that lack are generated first, by the model as it is.
exec python train_dreambooth_flux.py \
  --pretrained_model_name_or_path models/FLUX.1-dev \
  --instance_data_dir pictures/dog --instance_prompt "a photo of sks dog" \
  --with_prior_preservation --class_data_dir pictures/dogs --class_prompt "a photo of a dog" --num_class_images 100 \
  --resolution 512 --train_batch_size 1 --gradient_accumulation_steps 4 --gradient_checkpointing \
  --mixed_precision bf16 --rank 16 --learning_rate 1e-4 --max_train_steps 500 \
  --output_dir runs/dreambooth "$@"
