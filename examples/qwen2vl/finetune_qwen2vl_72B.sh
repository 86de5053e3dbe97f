#!/usr/bin/env bash
# Qwen2-VL 72B on 4 hosts of 8 devices: run it on every host, with the host's own number, 0 to 3.
# Arguments go to `mm train`:
#   MASTER_ADDR=10.0.0.1 NODE_RANK=0 bash examples/qwen2vl/finetune_qwen2vl_72B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

NNODES="${NNODES:-4}" exec bash examples/launch/two_hosts.sh examples/qwen2vl/qwen2vl_72B_config.yaml "$@"
