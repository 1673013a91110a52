#!/usr/bin/env bash
# serve.sh server | gateway [OPTIONS]: one process group in the foreground, for containers and systemd.
#   server   tritonserver and what belongs to it, until SIGTERM or until it ends; its log is on the standard output
#   gateway  the REST gateway in front of it
# MODELS  the model repository, may be read-only (default /srv/models)
# HOST    address the server listens at (default 127.0.0.1)
# Options are handed on to `python -m server start` or `python -m gateway serve`.
set -euo pipefail

cd "$(dirname "$(readlink -f "$0")")/.."
PY=${PY:-.venv/bin/python}
MODELS=${MODELS:-/srv/models}
command=${1:-server}
shift || true

case "$command" in
  gateway) exec "$PY" -m gateway serve --repo "$MODELS" "$@" ;;
  server) ;;
  *) echo "serve.sh: $command is no command; expected server or gateway" >&2; exit 2 ;;
esac

finish() { "$PY" -m server stop; exit "$1"; }
trap 'finish 0' TERM INT
"$PY" -m server start --repo "$MODELS" --host "${HOST:-127.0.0.1}" "$@" &
wait $!  # so that a signal is seen at once

# `tail` ends with the server: whoever started this script starts it again (Restart= of systemd, a container's policy).
read -r pid log < <("$PY" -c 'from server.environment import RUN_DIR; from server.state import known_servers
for state in known_servers(RUN_DIR): print(state.pid, state.log)')
tail --pid="$pid" -n +1 -F "$log" &
wait $! || true
echo "serve.sh: tritonserver has ended" >&2
finish 1
