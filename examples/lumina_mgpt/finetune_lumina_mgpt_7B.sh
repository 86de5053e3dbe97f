#!/usr/bin/env bash
# Lumina-mGPT 7B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/lumina_mgpt/finetune_lumina_mgpt_7B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/lumina_mgpt/lumina_mgpt_7B_config.yaml --nproc "${NPROC:-8}" "$@"
