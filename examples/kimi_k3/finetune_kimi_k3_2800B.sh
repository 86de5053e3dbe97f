#!/usr/bin/env bash
# Kimi-K3 2.8T on 128 hosts of 8 devices: run it on every host, with the host's own number, 0 to 127.
# Arguments go to `mm train`:
#   MASTER_ADDR=10.0.0.1 NODE_RANK=0 bash examples/kimi_k3/finetune_kimi_k3_2800B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

NNODES="${NNODES:-128}" exec bash examples/launch/two_hosts.sh examples/kimi_k3/kimi_k3_2800B_config.yaml "$@"
