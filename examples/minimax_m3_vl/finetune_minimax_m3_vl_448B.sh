#!/usr/bin/env bash
# MiniMax-M3-VL 448B on 32 hosts of 8 devices: run it on every host, with the host's own number, 0 to 31.
# Arguments go to `mm train`:
#   MASTER_ADDR=10.0.0.1 NODE_RANK=0 bash examples/minimax_m3_vl/finetune_minimax_m3_vl_448B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

NNODES="${NNODES:-32}" exec bash examples/launch/two_hosts.sh examples/minimax_m3_vl/minimax_m3_vl_448B_config.yaml "$@"
