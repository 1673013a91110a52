#!/usr/bin/env bash
# follow.sh [OPTIONS]: run one round of `python -m export follow OPTIONS`, as the training image does.
# It tries three times, each time as a process with another id: LMDB identifies the processes that use a store by their ids, and a
# process of a server's pod, whose ids begin at 1 as well, may have the same one.
set -euo pipefail

cd "$(dirname "$(readlink -f "$0")")/.."
PY=${PY:-.venv/bin/python}
for _ in 1 2 3; do
  "$PY" -m export follow --once "$@" && exit 0
done
exit 1
