#!/usr/bin/env bash
# Before finetune_self_forcing_1.3B.sh: fits the student to trajectories of its teacher, with CausVid's settings, on the 8
# devices of one host (NPROC: another number). Or convert a student that was fitted elsewhere: README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."

config=examples/self_forcing/self_forcing_1.3B_config.yaml
run=runs/self_forcing_1.3B_init
fit=(model.model_name_or_path=models/Wan2.1-T2V-1.3B-Diffusers posttrain.dmd.objective=ode_regression
     data.dataset_param.basic_parameters.max_samples=1500
     posttrain.reference.path=runs/self_forcing_1.3B_trajectories training.save=$run training.train_iters=3000
     training.adam_beta1=0.9 training.gradient_accumulation_steps=2 training.save_interval=200)

mm posttrain reference "$config" --nproc "${NPROC:-8}" "${fit[@]}"
mm train "$config" --nproc "${NPROC:-8}" "${fit[@]}" "$@"
mm export "$run" "$run/folder" --overwrite
