#!/usr/bin/env bash
# Makes the data, extracts, trains, generates, judges, exports, reports, command by command. Arguments go to `mm train`:
#   bash examples/moving_digits_i2v/finetune_moving_digits_i2v.sh training.train_iters=200
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

python examples/moving_digits_i2v/make_moving_digits_i2v.py runs/moving_digits_i2v
mm extract examples/moving_digits_i2v/moving_digits_i2v_config.yaml
mm train examples/moving_digits_i2v/moving_digits_i2v_config.yaml "$@"
mm infer runs/moving_digits_i2v/run --prompts runs/moving_digits_i2v/data/prompts.jsonl --out runs/moving_digits_i2v/samples --overwrite
python examples/moving_digits_i2v/judge_moving_digits_i2v.py runs/moving_digits_i2v
mm export runs/moving_digits_i2v/run runs/moving_digits_i2v/pipeline --overwrite
mm report runs/moving_digits_i2v/run
