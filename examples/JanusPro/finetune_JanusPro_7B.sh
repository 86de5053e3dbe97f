#!/usr/bin/env bash
# Janus-Pro 7B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/JanusPro/finetune_JanusPro_7B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/JanusPro/JanusPro_7B_config.yaml --nproc "${NPROC:-8}" "$@"
