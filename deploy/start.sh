#!/usr/bin/env bash
# start.sh: what the container runs. Engines for this GPU, then a look at what would fail, then one tritonserver.
#   MODELS   the model repository, writable: engines and the configurations that fit them are put into it (default /models)
#   ENGINES  keeps what is compiled for this machine between starts: engines, the stages' loops (default /engines)
#   CONTROL_KEY  a file for the key of model control, made at every start (default $ENGINES/control.key, mode 0600)
# Arguments are handed on to tritonserver.
set -euo pipefail

MODELS=${MODELS:-/models}
ENGINES=${ENGINES:-/engines}
BACKENDS=${BACKENDS:-/opt/tritonserver/backends}
HERE=$(dirname "$(readlink -f "$0")")
BUILDER=${BUILDER:-$HERE/build_engines.py}
[ -f "$BUILDER" ] || BUILDER=$HERE/../export/nvidia/tensorrt/build_engines.py  # started from a checkout

python3 "$BUILDER" --repository "$MODELS" --cache "$ENGINES" --backends "$BACKENDS"
python3 "$HERE/preflight.py" --repository "$MODELS" --backends "$BACKENDS"

# The stages compile their loops at the first start (20 s on two cores) and find them again here.
export NUMBA_CACHE_DIR=${NUMBA_CACHE_DIR:-$ENGINES/numba}

hps=()
if [ -f "$MODELS/ps.json" ]; then
  hps=("--backend-config=hps,ps=$MODELS/ps.json")
  # RocksDB makes its folder, but not those above it, and the hps backend then loads no model.
  rocksdb=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1])).get("persistent_db", {}).get("path", ""))' "$MODELS/ps.json")
  if [ -n "$rocksdb" ]; then mkdir -p "$(dirname "$rocksdb")"; fi
fi

# Who reaches a port may ask, and no more. The key is in the command line: of the container's users and of the host's, who can
# list its processes, but of no caller.
control_key=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
(umask 077 && mkdir -p "$ENGINES" && rm -f "${CONTROL_KEY:=$ENGINES/control.key}" && printf %s "$control_key" > "$CONTROL_KEY")
restricted="model-repository,shared-memory,logging,trace,statistics:recommender-control=$control_key"

# Summaries: quantiles of latency on the metrics port, which the alerts go by.
exec tritonserver --model-repository="$MODELS" --model-control-mode=explicit --load-model='*' \
  --disable-auto-complete-config --exit-timeout-secs=30 --metrics-config=summary_latencies=true \
  --http-restricted-api="$restricted" --grpc-restricted-protocol="$restricted" "${hps[@]}" "$@"
