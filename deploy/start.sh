#!/usr/bin/env bash
# start.sh: the container's command. Builds engines for this GPU, checks what would fail, and becomes one tritonserver.
#   MODELS   the model repository, writable: engines and their configurations are written into it (default /models)
#   ENGINES  a folder that keeps, between starts, what was compiled for this machine: engines, the stages' loops (default /engines)
#   BACKENDS  the folder of tritonserver's backends (default /opt/tritonserver/backends)
#   CONTROL_KEY  the file for the key of model control, which is new at every start (default $ENGINES/control.key, mode 0600)
# Arguments are passed to tritonserver.
set -euo pipefail

MODELS=${MODELS:-/models}
ENGINES=${ENGINES:-/engines}
BACKENDS=${BACKENDS:-/opt/tritonserver/backends}
HERE=$(dirname "$(readlink -f "$0")")
BUILDER=$HERE/build_engines.py
[ -f "$BUILDER" ] || BUILDER=$HERE/../export/nvidia/tensorrt/build_engines.py  # started from a checkout

python3 "$BUILDER" --repository "$MODELS" --cache "$ENGINES" --backends "$BACKENDS"
python3 "$HERE/preflight.py" --repository "$MODELS" --backends "$BACKENDS"

# The stages compile their loops at the first start (20 s on two cores) and find them again here.
export NUMBA_CACHE_DIR=${NUMBA_CACHE_DIR:-$ENGINES/numba}

hps=()
if [ -f "$MODELS/ps.json" ]; then
  hps=("--backend-config=hps,ps=$MODELS/ps.json")
  # RocksDB creates its folder, but not the parents. Without them the hps backend loads no model.
  rocksdb=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1])).get("persistent_db", {}).get("path", ""))' "$MODELS/ps.json")
  if [ -n "$rocksdb" ]; then mkdir -p "$(dirname "$rocksdb")"; fi
fi

# Whoever reaches a port may ask for answers, and nothing else: the other protocols need a key. The key is in the command line, so
# users of this container and of the host, who can list processes, can read it; callers cannot.
control_key=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
(umask 077 && mkdir -p "$ENGINES" && rm -f "${CONTROL_KEY:=$ENGINES/control.key}" && printf %s "$control_key" > "$CONTROL_KEY")
restricted="model-repository,shared-memory,logging,trace,statistics:recommender-control=$control_key"

# The alerts use the quantiles of latency that summary_latencies adds to the metrics.
exec tritonserver --model-repository="$MODELS" --model-control-mode=explicit --load-model='*' \
  --disable-auto-complete-config --exit-timeout-secs=30 --metrics-config=summary_latencies=true \
  --http-restricted-api="$restricted" --grpc-restricted-protocol="$restricted" "${hps[@]}" "$@"
