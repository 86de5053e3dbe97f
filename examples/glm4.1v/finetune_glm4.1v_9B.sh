#!/usr/bin/env bash
# GLM-4.1V 9B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/glm4.1v/finetune_glm4.1v_9B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/glm4.1v/glm4.1v_9B_config.yaml --nproc "${NPROC:-8}" "$@"
