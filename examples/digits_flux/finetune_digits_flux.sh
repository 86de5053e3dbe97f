#!/usr/bin/env bash
# Makes the data, extracts, trains, generates, judges, exports, reports, command by command. Arguments go to `mm train`:
#   bash examples/digits_flux/finetune_digits_flux.sh training.train_iters=200
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

python examples/digits_flux/make_digits_flux.py runs/digits_flux
mm extract examples/digits_flux/digits_flux_config.yaml
mm train examples/digits_flux/digits_flux_config.yaml "$@"
mm infer runs/digits_flux/run --out runs/digits_flux/samples --num-samples 40 --overwrite
python examples/digits_flux/judge_digits.py runs/digits_flux
mm export runs/digits_flux/run runs/digits_flux/pipeline --overwrite
mm report runs/digits_flux/run
