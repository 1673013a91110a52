#!/usr/bin/env bash
# setup.sh: everything the project needs on a Debian or Ubuntu machine with python3.11: the few shared libraries that pip cannot
# bring (apt, only those that are missing), and .venv with the pinned packages of requirements.txt.
# A second call with the same requirements returns at once. PYTHON: the interpreter of .venv. By default python3.11, and where that
# is not on PATH the one that .venv was made with.
set -euo pipefail
cd "$(dirname "$0")"

UV_VERSION=0.13.8
LOG=.run/setup.log
OPTIONAL="libb64-0d|libssl3|redis-server"

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$1"; [ $# -lt 2 ] || say "$2"; exit 1; }

# What a finished setup depends on; the stamp inside .venv holds it, so that it disappears with .venv.
fingerprint() { cat requirements.txt setup.sh | sha256sum | cut -d' ' -f1; }
stamp=.venv/.setup-stamp
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ] && .venv/bin/python -c '' 2>/dev/null; then
  exit 0
fi

[ "$(uname -sm)" = "Linux x86_64" ] || fail "this machine is $(uname -sm); the packaged tritonserver needs Linux on x86_64." \
  "Run it on such a machine, or in a linux/amd64 container."
made_with=$(sed -n 's/^executable = //p' .venv/pyvenv.cfg 2>/dev/null || true)
if [ -z "${PYTHON-}" ]; then
  PYTHON=python3.11
  if ! python3.11 -c '' 2>/dev/null && [ -x "$made_with" ]; then PYTHON=$made_with; fi
fi
command -v "$PYTHON" >/dev/null && "$PYTHON" -c '' 2>/dev/null || fail "no $PYTHON on PATH; NVTabular has no packages for later versions." \
  "Install it (Debian 12: apt-get install python3 python3-venv; Ubuntu: apt-get install python3.11 python3.11-venv), or set PYTHON=/path/to/python3.11."
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
  fail "$PYTHON is $("$PYTHON" -V); the pinned packages need CPython 3.11." "Set PYTHON=/path/to/python3.11."
mkdir -p .run

# --- apt: one package per library that is missing ------------------------------------------------------------------------------
missing_packages() {
  "$PYTHON" - <<'PY'
import ctypes, importlib.util, pathlib, shutil, sysconfig

def loads(library):
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True

# The Python backend's stub is linked against libpython3.11.so.1.0: the interpreter's own, else the distribution's.
libdir, multiarch = pathlib.Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib"), sysconfig.get_config_var("MULTIARCH") or ""
folders = (libdir, libdir / multiarch, pathlib.Path("/usr/lib/x86_64-linux-gnu"))
has_libpython = any((folder / "libpython3.11.so.1.0").exists() for folder in folders)
wanted = {
    "libpython3.11": has_libpython,
    "python3.11-venv": importlib.util.find_spec("ensurepip") is not None,
    "libb64-0d": loads("libb64.so.0d"),
    "libssl3": loads("libssl.so.3"),
    "libgomp1": loads("libgomp.so.1"),  # numeric wheels built with OpenMP
    "libstdc++6": loads("libstdc++.so.6"),
    "zlib1g": loads("libz.so.1"),
    "redis-server": shutil.which("redis-server") is not None,  # the embedding tiers' tests start their own
}
print(*(package for package, present in wanted.items() if not present))
PY
}
packages=$(missing_packages)
can_install() {
  command -v apt-get >/dev/null || { say "this system has no apt-get; install what corresponds to: $packages"; return 1; }
  [ "$(id -u)" = 0 ] && return
  command -v sudo >/dev/null || { say "not root, and there is no sudo. As root: apt-get install -y $packages"; return 1; }
  sudo -n true 2>/dev/null || { say "sudo would ask for a password. Run: sudo apt-get install -y $packages"; return 1; }
  as_root=(sudo -n)
}
as_root=()
# RUNLEVEL=1: a package that brings a service (redis-server) must not start it here.
apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -qq -o DPkg::Lock::Timeout=120 "$@" >>"$LOG" 2>&1; }
if [ -n "$packages" ]; then
  say "needed from apt: $packages"
  if can_install; then
    # A stale package list is the usual reason for a failed install, and a fresh list costs seconds: try without, then with it.
    # shellcheck disable=SC2086  # one word per package
    apt install -y --no-install-recommends $packages || { apt update && apt install -y --no-install-recommends $packages; } ||
      { tail -n 5 "$LOG" >&2; say "apt could not install them (log: $LOG). Check the network and /etc/apt/sources.list."; }
  fi
  left=$(missing_packages)
  required=$(printf '%s\n' $left | grep -vxE "$OPTIONAL" || true)
  [ -z "$required" ] || fail "cannot go on without $(echo $required)." "Install that, then run make setup again."
  [ -z "$left" ] || say "going on without $(echo $left): everything runs, except what needs it (perf_analyzer, tests with a real Redis)."
fi

# --- .venv ------------------------------------------------------------------------------------------------------------------------
if ! .venv/bin/python -c '' 2>/dev/null; then
  say "creating .venv"
  "$PYTHON" -m venv --clear .venv >>"$LOG" 2>&1 || { tail -n 5 "$LOG" >&2; fail "$PYTHON -m venv failed (log: $LOG)." "Install python3.11-venv, or set PYTHON to another python3.11."; }
fi
network_failed() { tail -n 15 "$LOG" >&2; fail "$1 (log: $LOG)." "Check the network, and pip's index settings if you use a mirror; then run make setup again: it goes on where it stopped."; }
if [ "$(.venv/bin/uv --version 2>/dev/null | cut -d' ' -f2)" != "$UV_VERSION" ]; then
  .venv/bin/python -m pip install -q "uv==$UV_VERSION" >>"$LOG" 2>&1 || network_failed "could not install uv $UV_VERSION"
fi

# uv (which resolves the Merlin packages; pip refuses them) does not read pip's configuration: hand it on.
pip_setting() { .venv/bin/python -m pip config get "global.$1" 2>/dev/null || true; }
find_links=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-$(pip_setting find-links)}}
index=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-$(pip_setting index-url)}}
certificates=${SSL_CERT_FILE:-${PIP_CERT:-$(pip_setting cert)}}
[ -z "$find_links" ] || export UV_FIND_LINKS="$find_links"
[ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
[ -z "$certificates" ] || export SSL_CERT_FILE="$certificates"
export VIRTUAL_ENV="$PWD/.venv" UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-180}"

# torch from the index brings gigabytes of CUDA packages: take the CPU build, from the configured folder or from torch's own index.
torch_from=(--torch-backend=cpu)
for folder in $find_links; do
  if compgen -G "${folder#file://}/torch-*cpu*.whl" >/dev/null; then torch_from=(); fi
done
say "installing the packages of requirements.txt into .venv (a few minutes the first time)"
.venv/bin/uv pip install "${torch_from[@]}" -r requirements.txt >>"$LOG" 2>&1 || network_failed "could not install requirements.txt"

[ -n "${left-}" ] || fingerprint >"$stamp"  # what is still missing is looked for again next time
say "ready: .venv ($(.venv/bin/python -V))"
