#!/usr/bin/env bash
# Writes the clips, trains both models and scores them on voices that they have not heard. Arguments go to `mm train`:
#   bash examples/spoken_digits/finetune_spoken_digits.sh --nproc 2
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

DATA=runs/spoken_digits/data
python examples/spoken_digits/make_spoken_digits.py runs/spoken_digits
mm train examples/spoken_digits/spoken_digits_asr_config.yaml "$@"
mm evaluate runs/spoken_digits/asr --data $DATA/transcripts/test.jsonl --media-dir $DATA --metric wer --max-new-tokens 8
mm train examples/spoken_digits/spoken_digits_questions_config.yaml "$@"
mm evaluate runs/spoken_digits/answers --data $DATA/questions/test.jsonl --media-dir $DATA --max-new-tokens 8
mm report runs/spoken_digits/asr runs/spoken_digits/answers --out runs/spoken_digits/report.html
