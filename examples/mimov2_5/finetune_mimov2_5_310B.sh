#!/usr/bin/env bash
# MiMo-V2.5 310B-A15B on 32 hosts of 8 devices: run it on every host, with the host's own number, 0 to 31.
# Arguments go to `mm train`:
#   MASTER_ADDR=10.0.0.1 NODE_RANK=0 bash examples/mimov2_5/finetune_mimov2_5_310B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

NNODES="${NNODES:-32}" exec bash examples/launch/two_hosts.sh examples/mimov2_5/mimov2_5_310B_config.yaml "$@"
