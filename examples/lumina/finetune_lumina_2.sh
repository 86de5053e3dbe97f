#!/usr/bin/env bash
# Lumina-Image 2.0 on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/lumina/finetune_lumina_2.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

mm extract examples/lumina/lumina_2_config.yaml --nproc "${NPROC:-8}"
exec mm train examples/lumina/lumina_2_config.yaml --nproc "${NPROC:-8}" "$@"
