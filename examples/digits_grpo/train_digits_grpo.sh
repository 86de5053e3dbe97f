#!/usr/bin/env bash
# The tiny reader of examples/digits: 310 supervised steps, then GRPO on its own answers. Run it in the repository's root.
set -e

[ -d runs/digits/model ] || python examples/digits/make_digits.py runs/digits
python examples/digits_grpo/make_prompts.py runs/digits/data

# The start: the quick start's training, cut after 310 of its 900 steps.
mm train examples/digits/digits_tiny_config.yaml --steps 310 training.save=runs/digits_grpo/supervised \
  training.val_interval=0
mm export runs/digits_grpo/supervised runs/digits_grpo/start
mm evaluate runs/digits_grpo/start --data runs/digits/data/reading_test.jsonl --max-new-tokens 8 --out runs/digits_grpo/before

mm train examples/digits_grpo/digits_grpo_config.yaml
mm export runs/digits_grpo/run runs/digits_grpo/hf
mm evaluate runs/digits_grpo/hf --data runs/digits/data/reading_test.jsonl --max-new-tokens 8 --out runs/digits_grpo/after
mm report runs/digits_grpo/run
