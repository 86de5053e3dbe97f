#!/usr/bin/env bash
# InternVL3.5 30B-A3B on 2 hosts of 8 devices: run it on every host, with the host's own number, 0 to 1.
# Arguments go to `mm train`:
#   MASTER_ADDR=10.0.0.1 NODE_RANK=0 bash examples/internvl3.5/finetune_internvl3.5_30B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

NNODES="${NNODES:-2}" exec bash examples/launch/two_hosts.sh examples/internvl3.5/internvl3.5_30B_config.yaml "$@"
