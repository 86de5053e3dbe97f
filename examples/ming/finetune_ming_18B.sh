#!/usr/bin/env bash
# Ming-Lite-Omni 1.5 on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/ming/finetune_ming_18B.sh training.lr=1e-5
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/ming/ming_18B_config.yaml --nproc "${NPROC:-8}" "$@"
