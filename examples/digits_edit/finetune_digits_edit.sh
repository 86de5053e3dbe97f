#!/usr/bin/env bash
# Makes the data, extracts, trains, generates, judges, exports, reports, command by command. Arguments go to `mm train`:
#   bash examples/digits_edit/finetune_digits_edit.sh training.train_iters=200
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

python examples/digits_edit/make_digits_edit.py runs/digits_edit
mm extract examples/digits_edit/digits_edit_config.yaml
mm train examples/digits_edit/digits_edit_config.yaml "$@"
mm infer runs/digits_edit/run --prompts runs/digits_edit/data/prompts.jsonl --out runs/digits_edit/samples --overwrite
python examples/digits_edit/judge_digits_edit.py runs/digits_edit
mm export runs/digits_edit/run runs/digits_edit/pipeline --overwrite
mm report runs/digits_edit/run
