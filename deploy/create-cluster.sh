#!/bin/sh
# create-cluster.sh: one Redis cluster of the nodes in $NODES ("host:port host:port host:port"); nothing when it exists already.
set -eu
: "${NODES:?names no nodes; expected host:port host:port host:port}"
first=${NODES%% *}

state() { redis-cli -h "${first%:*}" -p "${first#*:}" cluster info | grep -q cluster_state:ok; }

if state; then
  echo "the cluster at $first exists"
  exit 0
fi
# shellcheck disable=SC2086  # one word per node
redis-cli --cluster create $NODES --cluster-replicas 0 --cluster-yes
tries=0
until state; do
  tries=$((tries + 1))
  [ "$tries" -lt 60 ] || { echo "the cluster at $first is not ready after 60 s" >&2; exit 1; }
  sleep 1
done
