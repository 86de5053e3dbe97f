#!/usr/bin/env bash
# GPT-OSS 20B on the 8 devices of one host (NPROC: another number). Arguments go to `mm train`:
#   bash examples/gpt_oss/finetune_gpt_oss_20B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

exec mm train examples/gpt_oss/gpt_oss_20B_config.yaml --nproc "${NPROC:-8}" "$@"
