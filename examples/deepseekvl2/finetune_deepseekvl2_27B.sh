#!/usr/bin/env bash
# DeepSeek-VL2 27B-A4.5B on 2 hosts of 8 devices: run it on both hosts, with the host's own number, 0 and 1.
# Arguments go to `mm train`:
#   MASTER_ADDR=10.0.0.1 NODE_RANK=0 bash examples/deepseekvl2/finetune_deepseekvl2_27B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

NNODES="${NNODES:-2}" exec bash examples/launch/two_hosts.sh examples/deepseekvl2/deepseekvl2_27B_config.yaml "$@"
