#!/usr/bin/env bash
# Makes the data, trains, reads, draws and edits, judges, command by command. Arguments go to `mm train`:
#   bash examples/bagel_digits/finetune_bagel_digits.sh training.train_iters=200
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

python examples/bagel_digits/make_bagel_digits.py runs/bagel_digits
mm train examples/bagel_digits/bagel_digits_config.yaml "$@"
mm infer runs/bagel_digits/run --data runs/bagel_digits/data/asked.jsonl --out runs/bagel_digits/answers.jsonl \
  --size 8x8 --steps 20 --guidance-scale 1 --max-new-tokens 4 --overwrite
python examples/bagel_digits/judge_bagel_digits.py runs/bagel_digits
mm report runs/bagel_digits/run
