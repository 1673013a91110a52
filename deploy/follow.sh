#!/usr/bin/env bash
# follow.sh [OPTIONS]: what the training image runs: one round of `python -m export follow`.
# Options are handed on to it. It is tried three times, each as another process: LMDB admits one process of each id to the events'
# store, and processes of the pods, which count from 1 like this container's, may have the same id.
set -euo pipefail

cd "$(dirname "$(readlink -f "$0")")/.."
PY=${PY:-.venv/bin/python}
for _ in 1 2 3; do
  "$PY" -m export follow --once "$@" && exit 0
done
exit 1
