#!/usr/bin/env bash
# Kimi-K2.5 1T-A32B on 64 hosts of 8 devices: run it on every host, with the host's own number, 0 to 63.
# Arguments go to `mm train`:
#   MASTER_ADDR=10.0.0.1 NODE_RANK=0 bash examples/kimik2_5/finetune_kimik2_5_1T.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

NNODES="${NNODES:-64}" exec bash examples/launch/two_hosts.sh examples/kimik2_5/kimik2_5_1T_config.yaml "$@"
