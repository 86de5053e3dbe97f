#!/usr/bin/env bash
# Writes the data, trains, evaluates and reports, command by command. Arguments go to `mm train`:
#   bash examples/moving_digits/finetune_moving_digits.sh --nproc 2
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

python examples/moving_digits/make_clips.py runs/moving_digits
mm train examples/moving_digits/moving_digits_config.yaml "$@"
mm evaluate runs/moving_digits/run --data runs/moving_digits/data/test.jsonl --max-new-tokens 8
mm report runs/moving_digits/run
