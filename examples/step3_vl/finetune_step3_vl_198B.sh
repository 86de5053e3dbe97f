#!/usr/bin/env bash
# Step-3.7-Flash 198B on 16 hosts of 8 devices: run it on every host, with the host's own number, 0 to 15.
# Arguments go to `mm train`:
#   MASTER_ADDR=10.0.0.1 NODE_RANK=0 bash examples/step3_vl/finetune_step3_vl_198B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

NNODES="${NNODES:-16}" exec bash examples/launch/two_hosts.sh examples/step3_vl/step3_vl_198B_config.yaml "$@"
