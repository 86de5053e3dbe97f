#!/usr/bin/env bash
# Qwen3.5 35B-A3B on 2 hosts of 8 devices: run it on every host, with the host's own number, 0 to 1.
# Arguments go to `mm train`:
#   MASTER_ADDR=10.0.0.1 NODE_RANK=0 bash examples/qwen3.5/finetune_qwen3.5_35B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

NNODES="${NNODES:-2}" exec bash examples/launch/two_hosts.sh examples/qwen3.5/qwen3.5_35B_config.yaml "$@"
