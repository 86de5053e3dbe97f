#!/usr/bin/env bash
# SANA 1.6B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/sana/finetune_sana_1600M.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

mm extract examples/sana/sana_1600M_config.yaml --nproc "${NPROC:-8}"
exec mm train examples/sana/sana_1600M_config.yaml --nproc "${NPROC:-8}" "$@"
