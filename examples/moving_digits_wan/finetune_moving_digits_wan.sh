#!/usr/bin/env bash
# Makes the data, extracts, trains, generates, judges, exports, reports, command by command. Arguments go to `mm train`:
#   bash examples/moving_digits_wan/finetune_moving_digits_wan.sh training.train_iters=200
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

python examples/moving_digits_wan/make_moving_digits.py runs/moving_digits_wan
mm extract examples/moving_digits_wan/moving_digits_wan_config.yaml
mm train examples/moving_digits_wan/moving_digits_wan_config.yaml "$@"
mm infer runs/moving_digits_wan/run --out runs/moving_digits_wan/samples --num-samples 20 --overwrite
python examples/moving_digits_wan/judge_moving_digits.py runs/moving_digits_wan
mm export runs/moving_digits_wan/run runs/moving_digits_wan/pipeline --overwrite
mm report runs/moving_digits_wan/run
