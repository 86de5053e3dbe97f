#!/usr/bin/env bash
# FLUX.2 klein 4B (base) on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/flux2/finetune_flux2_klein_4B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

mm extract examples/flux2/flux2_klein_4B_config.yaml --nproc "${NPROC:-8}"
exec mm train examples/flux2/flux2_klein_4B_config.yaml --nproc "${NPROC:-8}" "$@"
