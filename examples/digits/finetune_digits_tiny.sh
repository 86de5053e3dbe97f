#!/usr/bin/env bash
# Writes the data, trains, exports, evaluates and reports, command by command. Arguments go to `mm train`:
#   bash examples/digits/finetune_digits_tiny.sh --nproc 2
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

python examples/digits/make_digits.py runs/digits
mm train examples/digits/digits_tiny_config.yaml "$@"
mm export runs/digits/run runs/digits/hf --overwrite
mm evaluate runs/digits/hf --data runs/digits/data/test.jsonl --out runs/digits/run/eval --max-new-tokens 16
mm report runs/digits/run
