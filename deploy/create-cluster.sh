#!/bin/sh
# create-cluster.sh: one Redis cluster of the nodes in $NODES ("host:port host:port host:port"), made of nodes that know no other.
# Nodes that are a cluster already are left as they are, and waited for: after a restart they read their files first.
set -eu
: "${NODES:?names no nodes; expected host:port host:port host:port}"

# redis-cli prints an error ("LOADING …") where the answer would be and exits with 0: only lines of the answer count.
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
  echo "$alone of the $nodes nodes $NODES know no other, the rest are of a cluster; expected all or none." \
    "Add them (redis-cli --cluster add-node), or start all of them again without their files." >&2
  exit 1
fi
wait_until ready 60
