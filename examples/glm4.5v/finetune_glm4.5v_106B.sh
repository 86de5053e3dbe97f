#!/usr/bin/env bash
# GLM-4.5V 106B-A12B on 8 hosts of 8 devices: run it on every host, with the host's own number, 0 to 7.
# Arguments go to `mm train`:
#   MASTER_ADDR=10.0.0.1 NODE_RANK=0 bash examples/glm4.5v/finetune_glm4.5v_106B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

NNODES="${NNODES:-8}" exec bash examples/launch/two_hosts.sh examples/glm4.5v/glm4.5v_106B_config.yaml "$@"
