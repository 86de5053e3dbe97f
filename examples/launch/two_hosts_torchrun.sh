#!/usr/bin/env bash
# The same with torchrun itself, whose hosts find their numbers by themselves: one command on every host.
#   MASTER_ADDR=10.0.0.1 bash examples/launch/two_hosts_torchrun.sh run.yaml
# torchrun asks for the names of hosts. Where they resolve nowhere, or to the loopback, say on every host its own address
# (HOST_ADDR=10.0.0.2) and on that of MASTER_ADDR also RDZV_CONF=is_host=1, on the others RDZV_CONF=is_host=0.
set -euo pipefail

trainer="$(python -c 'import importlib.util as u; print(u.find_spec("mindspeed_mm.fsdp.train.trainer").origin)')"

exec torchrun \
  --nnodes "${NNODES:-2}" \
  --nproc-per-node "${NPROC:-8}" \
  --rdzv-backend c10d \
  --rdzv-endpoint "${MASTER_ADDR:?the address of one host, the same on all}:${MASTER_PORT:-29400}" \
  --rdzv-id "${JOB_ID:-mm}" \
  ${HOST_ADDR:+--local-addr "$HOST_ADDR"} \
  ${RDZV_CONF:+--rdzv-conf "$RDZV_CONF"} \
  "$trainer" "$@"
