"""Find tritonserver and perf_analyzer in the Python packages, and build the environment variables that each needs.

The nvidia-pytriton wheel has tritonserver, its Python backend, and one stub executable per Python version. The stub must be in
the folder of libtriton_python.so, so we build a backend folder with symbolic links to both.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from serving.contract.errors import ServerError

PROJECT = Path(__file__).resolve().parents[2]
RUN_DIR = PROJECT / ".run"
MEASURED_DIR = RUN_DIR / "perf"  # run folder of the servers that a measurement starts and stops
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Wheel:
    """Paths in the nvidia-pytriton wheel."""

    server: Path  # the tritonserver executable
    backend: Path  # libtriton_python.so and triton_python_backend_utils.py
    stub: Path  # the stub executable for the running Python
    caches: Path  # the response caches
    libraries: Path  # shared libraries the wheel bundles


def find_wheel() -> Wheel:
    """Return the wheel of the active environment. Raises ServerError when it is missing or has no stub for this Python."""
    spec = find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ServerError("The package nvidia-pytriton, which carries tritonserver, is not installed. Run `make setup`.")
    package = Path(spec.origin).parent
    root = package / "tritonserver"
    stub = root / "python_backend_stubs" / PYTHON_VERSION / "triton_python_backend_stub"
    if not stub.exists():
        carried = ", ".join(sorted(folder.name for folder in stub.parents[1].glob("*"))) or "none"
        raise ServerError(f"nvidia-pytriton has no stub for Python {PYTHON_VERSION}; it carries {carried}. Run `make setup`.")
    libraries = package.parent / "nvidia_pytriton.libs"
    return Wheel(root / "bin" / "tritonserver", root / "backends" / "python", stub, root / "caches", libraries)


def build_backend_directory(wheel: Wheel, run_dir: Path) -> Path:
    """Return the folder for --backend-directory. It is built under `run_dir`, again whenever the wheel or Python changes."""
    backends = run_dir / "backends" / f"python{PYTHON_VERSION}"
    folder = backends / "python"
    no_bytecode = "__pycache__"  # an empty file: Python writes nothing beside the sources, so that the folder stays as built
    sources = {source.name: source.resolve() for source in (*wheel.backend.iterdir(), wheel.stub) if source.is_file()}
    built = {entry.name: entry.resolve() for entry in folder.iterdir()} if folder.is_dir() else {}
    if built.pop(no_bytecode, folder).is_file() and built == sources:
        return backends
    # built under another name and renamed, because two servers may start at the same time
    fresh = backends.with_name(f"{backends.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / "python").mkdir(parents=True)
    for name, source in sources.items():
        (fresh / "python" / name).symlink_to(source)
    (fresh / "python" / no_bytecode).touch()
    shutil.rmtree(backends, ignore_errors=True)
    try:
        fresh.rename(backends)
    except OSError:  # another process was faster; its folder has the same contents
        shutil.rmtree(fresh, ignore_errors=True)
    return backends


def find_libpython_directory() -> Path:
    """Return the folder of the running interpreter's libpython. Raises ServerError when there is none.

    The stub loads it by name; with another build of the same version, models fail with undefined symbols.
    """
    name = f"libpython{PYTHON_VERSION}.so.1.0"
    libdir = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    for folder in (libdir, libdir / multiarch, Path("/usr/lib") / multiarch):
        if (folder / name).exists():
            return folder
    raise ServerError(f"Python models need {name}, which is neither in {libdir} nor in /usr/lib/{multiarch}. Run `make setup`.")


def build_server_env(wheel: Wheel, threads: int = 1) -> dict[str, str]:
    """Return the environment of the server and its stubs: this virtual environment, `threads` per numeric library.

    The stubs run isolated: they ignore every PYTHON… variable, but use this virtual environment's packages.
    """
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
    bin_dir = Path(sys.prefix) / "bin"
    libraries = (find_libpython_directory(), wheel.libraries, *_split_path(env.get("LD_LIBRARY_PATH")))
    env |= {
        "VIRTUAL_ENV": sys.prefix,
        "PATH": f"{bin_dir}{os.pathsep}{env.get('PATH', os.defpath)}",
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
    }
    return env | {name: str(threads) for name in THREAD_VARIABLES}


def describe_unwritable_cache() -> str:
    """Return a message if models cannot keep their compiled loops (serving/loops/compiled.py); "" otherwise.

    A folder that is read-only on purpose, such as that of an image, holds some.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or home / "numba")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK) or any(folder.iterdir()):
            return ""
    except OSError:  # its home cannot be written, for instance
        pass
    return (
        f"compiled loops cannot be kept in {folder}, so every start and restart compiles them again, which takes minutes on a "
        "small machine. Set NUMBA_CACHE_DIR to a folder that this user can write"
    )


def build_perf_analyzer_env() -> dict[str, str]:
    """Return the environment of tritonclient's perf_analyzer, with CUDA's runtime library from its Python package.

    Raises ServerError when that package is missing.
    """
    spec = find_spec("nvidia.cuda_runtime")
    if spec is None or not spec.submodule_search_locations:
        raise ServerError("The package nvidia-cuda-runtime-cu12, which perf_analyzer needs, is missing. Run `make setup`.")
    cudart = Path(next(iter(spec.submodule_search_locations))) / "lib"
    libraries = (cudart, *_split_path(os.environ.get("LD_LIBRARY_PATH")))
    path = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    bypass = {"no_proxy": "localhost,127.0.0.1"}  # only servers on this machine are measured
    return os.environ | bypass | {"LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)), "PATH": path}


def _split_path(library_path: str | None) -> list[str]:
    return [folder for folder in (library_path or "").split(os.pathsep) if folder]
