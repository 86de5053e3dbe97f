#!/usr/bin/env bash
# LTX-2 19B on 1 device of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/ltx2/finetune_ltx2_19B_lora.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

mm extract examples/ltx2/ltx2_19B_lora_config.yaml --nproc "${NPROC:-1}"
exec mm train examples/ltx2/ltx2_19B_lora_config.yaml --nproc "${NPROC:-1}" "$@"
