#!/usr/bin/env bash
# Makes a start and pairs, trains, and evaluates, command by command. Arguments go to the second `mm train`:
#   bash examples/digits_dpo/finetune_digits_dpo.sh posttrain.dpo.pref_ftx=0 training.save=runs/digits_dpo/without
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

python examples/digits/make_digits.py runs/digits
python examples/digits_dpo/make_pairs.py runs/digits runs/digits_dpo
mm train examples/digits/digits_tiny_config.yaml --steps 400 training.save=runs/digits_dpo/supervised
mm export runs/digits_dpo/supervised runs/digits_dpo/start --overwrite
mm train examples/digits_dpo/digits_dpo_config.yaml "$@"
