#!/bin/sh
# create-cluster.sh: join the new nodes in $NODES ("host:port host:port host:port") to one Redis cluster, and wait until it is ready.
# An existing cluster is left as it is, and waited for: after a restart its nodes load their files first.
set -eu
: "${NODES:?names no nodes; expected host:port host:port host:port}"

# redis-cli prints an error ("LOADING …") instead of the answer and exits with 0: so look for lines of the answer.
cluster_info() { redis-cli -h "${1%:*}" -p "${1#*:}" cluster info 2>&1 | tr -d '\r'; }
known_nodes() { cluster_info "$1" | sed -n 's/^cluster_known_nodes://p'; }
answers() { [ -n "$(known_nodes "$1")" ]; }
ready() { cluster_info "$1" | grep -qx cluster_state:ok; }

# wait_until CONDITION SECONDS: on every node
wait_until() {
  for node in $NODES; do
    tries=0
    until "$1" "$node"; do
      tries=$((tries + 1))
      if [ "$tries" -ge "$2" ]; then
        echo "the node at $node is not ready after $2 s; expected cluster_state:ok, it says: $(cluster_info "$node" | head -n 1)." \
          "Look at its log, and at redis-cli --cluster check $node." >&2
        exit 1
      fi
      sleep 1
    done
  done
}

wait_until answers 600
nodes=0 alone=0
for node in $NODES; do
  nodes=$((nodes + 1))
  [ "$(known_nodes "$node")" != 1 ] || alone=$((alone + 1))
done
if [ "$alone" = 0 ]; then
  echo "the cluster of $NODES exists"
elif [ "$alone" = "$nodes" ]; then
  # shellcheck disable=SC2086  # one word per node
  redis-cli --cluster create $NODES --cluster-replicas 0 --cluster-yes
else
  echo "$alone of the $nodes nodes $NODES belong to no cluster, the others do; expected all or none." \
    "Add them (redis-cli --cluster add-node), or restart all of them with empty data folders." >&2
  exit 1
fi
wait_until ready 60
