#!/usr/bin/env bash
# DeepSeek-V3 671B-A37B on 32 hosts of 8 devices: run it on every host, with the host's own number, 0 to 31.
# Arguments go to `mm train`:
#   MASTER_ADDR=10.0.0.1 NODE_RANK=0 bash examples/deepseek_v3/finetune_deepseek_v3_671B.sh training.lr=5e-6
set -euo pipefail
cd "$(dirname "$0")/../.."

NNODES="${NNODES:-32}" exec bash examples/launch/two_hosts.sh examples/deepseek_v3/deepseek_v3_671B_config.yaml "$@"
