#!/usr/bin/env bash
# Two hosts on this machine, to try it: two network namespaces with a name and an address each, and a link between them.
# Needs Linux, iproute2 and user namespaces, no root.
#   NPROC=1 bash examples/launch/demo_two_namespaces.sh run.yaml
#   NPROC=1 CUT_AFTER_S=30 bash examples/launch/demo_two_namespaces.sh run.yaml training.step_timeout_s=10
# The second one pulls the cable after thirty seconds; the first one then continues from the last checkpoint.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"

keepers=()
trap 'kill "${keepers[@]}" 2>/dev/null || true' EXIT

keep() { # a namespace lives as long as a process in it
  "$@" sleep infinity &
  keepers+=($!)
  until [ "$(cat "/proc/$!/comm")" = sleep ]; do sleep 0.05; done
}
on() { # a command on host 0 or 1
  local keeper="${keepers[$1]}"
  nsenter --preserve-credentials --target "$keeper" --user --net --uts "${@:2}"
}

keep unshare --user --map-root-user --net --uts
keep nsenter --preserve-credentials --target "${keepers[0]}" --user --net unshare --net --uts
on 0 ip link add name wire0 type veth peer name wire1 netns "${keepers[1]}"
for host in 0 1; do
  on "$host" hostname "host-$host"
  on "$host" ip address add "10.77.0.$((host + 1))/24" dev "wire$host"
  on "$host" ip link set dev lo up
  on "$host" ip link set dev "wire$host" up
done

jobs=()
for host in 0 1; do
  on "$host" env NNODES=2 NODE_RANK="$host" MASTER_ADDR=10.77.0.1 bash "$here/two_hosts.sh" "$@" \
    > >(sed -u "s/^/host-$host: /") 2> >(sed -u "s/^/host-$host: /" >&2) &
  jobs+=($!)
done
if [ -n "${CUT_AFTER_S:-}" ]; then
  sleep "$CUT_AFTER_S"
  on 1 ip link set dev wire1 down
  echo "the link is cut"
fi

code=0
for job in "${jobs[@]}"; do
  wait "$job" || code=$?
done
exit "$code"
