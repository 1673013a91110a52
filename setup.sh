#!/usr/bin/env bash
# setup.sh: everything the project needs on a Debian or Ubuntu machine: CPython 3.11 or 3.12, the few shared libraries that pip
# cannot bring (apt, only those that are missing), and .venv with the pinned packages of requirements/dev.txt.
# A second call with the same requirements returns immediately.
# PYTHON: the interpreter of .venv. Default: the one that .venv was made with, else python3.11 or python3.12 on PATH, else a
# CPython 3.12 that uv downloads.
# FOR_TESTS=1: also the browser in which tests open the console.
set -euo pipefail
cd "$(dirname "$0")"

UV_VERSION=0.13.8
REQUIREMENTS=requirements/dev.txt
HASHES=requirements/hashes.txt  # of the files that the packages come in; a file with another hash is refused
HASHED_UV=(-q --no-deps --require-hashes -r requirements/uv.txt)  # options of pip install; the file names $UV_VERSION
LOG=.run/setup.log
OPTIONAL="libb64-0d|libssl3|redis-server"

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$1"; [ $# -lt 2 ] || say "$2"; exit 1; }
log_tail_and_fail() { tail -n 15 "$LOG" >&2; fail "$1 (log: $LOG)." "$2"; }
network_failed() { log_tail_and_fail "$1" "Check the network, and pip's index settings if you use a mirror; then run make setup again: it continues where it stopped."; }
# Print the version of the Python $1: "3.11", or "3.11 candidate" of a pre-release. Fail if it does not run.
version_of() {
  "$1" -c 'import sys; v = sys.version_info; print("%d.%d" % v[:2] + (" " + v.releaselevel) * (v.releaselevel != "final"))' 2>/dev/null
}

# What a finished setup depends on; the stamp inside .venv holds it, so that it disappears with .venv.
fingerprint() { cat "$REQUIREMENTS" setup.sh | sha256sum | cut -d' ' -f1; }
stamp=.venv/.setup-stamp
[ -z "${FOR_TESTS-}" ] || stamp=.venv/.setup-stamp-for-tests
if [ -z "${PYTHON-}" ] || [ "$(version_of "$PYTHON")" = "$(version_of .venv/bin/python)" ]; then
  if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ] && .venv/bin/python -c '' 2>/dev/null; then
    exit 0
  fi
fi

[ "$(uname -sm)" = "Linux x86_64" ] || fail "this machine is $(uname -sm); the packaged tritonserver needs Linux on x86_64." \
  "Run it on such a machine, or in a linux/amd64 container."
mkdir -p .run

# --- apt ------------------------------------------------------------------------------------------------------------------------
as_root=()
can_install() {
  command -v apt-get >/dev/null || { say "this system has no apt-get; install what corresponds to: $*"; return 1; }
  [ "$(id -u)" = 0 ] && return
  command -v sudo >/dev/null || { say "not root, and there is no sudo. As root: apt-get install -y $*"; return 1; }
  sudo -n true 2>/dev/null || { say "sudo would ask for a password. Run: sudo apt-get install -y $*"; return 1; }
  as_root=(sudo -n)
}
# RUNLEVEL=1: a package that brings a service (redis-server) must not start it here.
apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -qq -o DPkg::Lock::Timeout=120 "$@" >>"$LOG" 2>&1; }
# Install packages as far as that is possible; the caller checks afterwards.
apt_install() {
  say "needed from apt: $*"
  can_install "$@" || return 0
  # A stale package list is the usual reason for a failed install, and a fresh list costs seconds: try without, then with it.
  apt install -y --no-install-recommends "$@" || { apt update && apt install -y --no-install-recommends "$@"; } ||
    { tail -n 5 "$LOG" >&2; say "apt could not install them (log: $LOG). Check the network and /etc/apt/sources.list."; }
}

# --- the interpreter ------------------------------------------------------------------------------------------------------------
INSTALL_PYTHON="Install CPython 3.11 or 3.12 (Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv), or set PYTHON=/path/to/python."
# Print the first supported Python on PATH. A pyenv shim is on PATH for versions that are not active: it must run. Ubuntu 22.04
# has a release candidate of 3.11, which lacks what torch needs.
python_on_path() {
  local name
  for name in python3.11 python3.12; do
    case "$(version_of $name)" in 3.11 | 3.12) command -v $name; return ;; esac
  done
}
# Print a uv: the one on PATH, else one in a folder of its own, installed with any Python 3.
uv_for_download() {
  if command -v uv; then return; fi
  if ! .run/uv/bin/uv --version >/dev/null 2>&1; then
    { python3 -m venv --clear .run/uv && .run/uv/bin/python -m pip install "${HASHED_UV[@]}"; } >>"$LOG" 2>&1 ||
      python3 -m pip install --target .run/uv "${HASHED_UV[@]}" >>"$LOG" 2>&1 || return
  fi
  echo .run/uv/bin/uv
}
download_python() {
  local uv
  uv=$(uv_for_download) || network_failed "no python3.11 or python3.12 is on PATH, and uv, which would download one, could not be installed. $INSTALL_PYTHON"
  say "no python3.11 or python3.12 is on PATH: uv downloads CPython 3.12 (a build of python-build-standalone, from GitHub) into $("$uv" python dir)"
  "$uv" python install --no-bin 3.12 >>"$LOG" 2>&1 || log_tail_and_fail "uv could not download CPython 3.12" \
    "$INSTALL_PYTHON Or allow this machine to reach GitHub, or set UV_PYTHON_INSTALL_MIRROR to a mirror of python-build-standalone."
  PYTHON=$("$uv" python find --managed-python 3.12)
}

made_with=$(sed -n 's/^executable = //p' .venv/pyvenv.cfg 2>/dev/null || true)
if [ -z "${PYTHON-}" ]; then
  if [ -x "$made_with" ]; then PYTHON=$made_with; else PYTHON=$(python_on_path); fi
  if [ -z "$PYTHON" ] && ! python3 -c 'import ensurepip' 2>/dev/null; then
    apt_install python3 python3-venv
    PYTHON=$(python_on_path)
  fi
  [ -n "$PYTHON" ] || download_python
fi
version=$(version_of "$PYTHON") || fail "PYTHON=$PYTHON does not run." "$INSTALL_PYTHON"
case "$version" in
  3.11 | 3.12) ;;
  *) fail "$PYTHON is Python $version; the pinned packages need CPython 3.11 or 3.12." "$INSTALL_PYTHON" ;;
esac

# --- shared libraries: one apt package per library that is missing ------------------------------------------------------------------
missing_packages() {
  "$PYTHON" - <<'PY'
import ctypes, importlib.util, pathlib, shutil, sys, sysconfig

def loads(library):
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True

version = "%d.%d" % sys.version_info[:2]
# The Python backend's stub is linked against libpython3.X.so.1.0: the interpreter's own, else the distribution's.
libdir, multiarch = pathlib.Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib"), sysconfig.get_config_var("MULTIARCH") or ""
folders = (libdir, libdir / multiarch, pathlib.Path(sys.base_prefix, "lib"), pathlib.Path("/usr/lib/x86_64-linux-gnu"))
present = {
    f"libpython{version}": any((folder / f"libpython{version}.so.1.0").exists() for folder in folders),
    f"python{version}-venv": importlib.util.find_spec("ensurepip") is not None,
    "libb64-0d": loads("libb64.so.0d"),
    "libssl3": loads("libssl.so.3"),
    "libgomp1": loads("libgomp.so.1"),  # numeric wheels built with OpenMP
    "libstdc++6": loads("libstdc++.so.6"),
    "zlib1g": loads("libz.so.1"),
    "redis-server": shutil.which("redis-server") is not None,  # the embedding tables' tests start their own
}
if version != "3.11":  # NVTabular has a wheel for 3.11 and is compiled elsewhere
    present["g++"] = shutil.which("g++") is not None
    present[f"python{version}-dev"] = pathlib.Path(sysconfig.get_paths()["include"], "Python.h").exists()
print(*(package for package, found in present.items() if not found))
PY
}
packages=$(missing_packages)
if [ -n "$packages" ]; then
  # shellcheck disable=SC2086  # one word per package
  apt_install $packages
  packages=$(missing_packages)
  # shellcheck disable=SC2086
  required=$(printf '%s\n' $packages | { grep -vxE "$OPTIONAL" || true; } | xargs)
  [ -z "$required" ] || fail "cannot go on without $required." "Install that, then run make setup again."
  [ -z "$packages" ] || say "going on without $packages: everything runs, except what needs it (perf_analyzer, tests with a real Redis)."
fi

if [ -n "${FOR_TESTS-}" ] && ! command -v chromedriver >/dev/null; then
  apt_install chromium chromium-driver  # by themselves: Ubuntu has no such packages, and apt would install none of the others
  command -v chromedriver >/dev/null || say "going on without Chromium: the tests of the console are skipped."
fi

# --- .venv ------------------------------------------------------------------------------------------------------------------------
if [ "$(version_of .venv/bin/python)" != "$version" ]; then
  say "creating .venv with $PYTHON (Python $version)"
  "$PYTHON" -m venv --clear .venv >>"$LOG" 2>&1 || log_tail_and_fail "$PYTHON -m venv failed" "Install python$version-venv, or set PYTHON to another Python."
fi
if [ "$(.venv/bin/uv --version 2>/dev/null | cut -d' ' -f2)" != "$UV_VERSION" ]; then
  .venv/bin/python -m pip install "${HASHED_UV[@]}" >>"$LOG" 2>&1 || network_failed "could not install uv $UV_VERSION"
fi

# uv, which installs Merlin's packages where pip refuses them, does not read pip's configuration: pass it on.
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
  if compgen -G "${folder#file://}/torch-*cpu*-cp${version/./}-*.whl" >/dev/null; then torch_from=(); fi
done
# The file names every package, so nothing is left to resolve; it overrides what some packages declare (requirements/overrides.txt).
say "installing the packages of $REQUIREMENTS into .venv (a few minutes the first time)"
.venv/bin/uv pip install --no-deps "${torch_from[@]}" -r "$REQUIREMENTS" -c "$HASHES" >>"$LOG" 2>&1 || network_failed "could not install $REQUIREMENTS"

[ -n "$packages" ] || fingerprint | tee "$stamp" >.venv/.setup-stamp  # without the stamp, the next call looks for missing packages again
say "ready: .venv ($(.venv/bin/python -V))"
