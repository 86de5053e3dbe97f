#!/usr/bin/env bash
# Self-Forcing of Wan2.1 1.3B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/self_forcing/finetune_self_forcing_1.3B.sh training.train_iters=10
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/self_forcing/self_forcing_1.3B_config.yaml --nproc "${NPROC:-8}" "$@"
