#!/usr/bin/env bash
# serve.sh server | gateway [OPTIONS]: run one of the two in the foreground, as the CPU image does.
#   server   tritonserver under its supervisor (server/watch.py), until SIGTERM; its log is on the standard output
#   gateway  the REST gateway in front of it
# MODELS  the model repository, may be read-only (default /srv/models)
# HOST    address the server listens at (default 127.0.0.1)
# Options are those of `python -m server start` or `python -m gateway serve`.
set -euo pipefail

cd "$(dirname "$(readlink -f "$0")")/.."
PY=${PY:-.venv/bin/python}
MODELS=${MODELS:-/srv/models}
command=${1:-server}
shift || true

case "$command" in
  gateway) exec "$PY" -m gateway serve --repo "$MODELS" "$@" ;;
  server)
    grpc_port=8001 previous=
    for word in "$@"; do
      case "$word" in --grpc-port=*) grpc_port=${word#*=} ;; esac
      [ "$previous" != --grpc-port ] || grpc_port=$word
      previous=$word
    done
    tail --pid=$$ -n 0 -F ".run/logs/tritonserver-$grpc_port.log" 2>/dev/null &
    exec "$PY" -m server start --repo "$MODELS" --host "${HOST:-127.0.0.1}" --foreground "$@"
    ;;
  *) echo "serve.sh: $command is no command; expected server or gateway" >&2; exit 2 ;;
esac
