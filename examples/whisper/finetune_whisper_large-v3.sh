#!/usr/bin/env bash
# Whisper large-v3 on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/whisper/finetune_whisper_large-v3.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/whisper/whisper_large-v3_config.yaml --nproc "${NPROC:-8}" "$@"
