#!/usr/bin/env bash
# Trains a recogniser (examples/spoken_digits), a codec and a tiny Qwen3-TTS, and lets the recogniser hear what is said.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

python examples/spoken_digits/make_spoken_digits.py runs/spoken_digits
mm train examples/spoken_digits/spoken_digits_asr_config.yaml
python examples/speaking_digits/make_speaking_digits.py runs/speaking_digits
mm train examples/speaking_digits/speaking_digits_config.yaml "$@"
mm evaluate runs/speaking_digits/tts --data runs/speaking_digits/data/test.jsonl --recogniser runs/spoken_digits/asr
mm infer runs/speaking_digits/tts --prompt seven --speaker Ben --speak runs/speaking_digits/seven.wav
