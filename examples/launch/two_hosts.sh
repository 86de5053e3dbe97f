#!/usr/bin/env bash
# One job over several hosts without a scheduler: run it on every host, with the host's own number.
#   MASTER_ADDR=10.0.0.1 NODE_RANK=0 bash examples/launch/two_hosts.sh run.yaml     # on 10.0.0.1
#   MASTER_ADDR=10.0.0.1 NODE_RANK=1 bash examples/launch/two_hosts.sh run.yaml     # on the other one
# More words are overrides: … run.yaml training.lr=2e-5. NPROC: ranks on this host; NNODES: hosts.
set -euo pipefail

export NNODES="${NNODES:-2}"
export NODE_RANK="${NODE_RANK:?the number of this host, from 0}"
export MASTER_ADDR="${MASTER_ADDR:?the address of host 0, as the others reach it}"
export MASTER_PORT="${MASTER_PORT:-29500}"

exec mm train "$@" --nproc "${NPROC:-8}"
