import ctypes
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from server.start import environment
from serving.contract.errors import ServerError


def test_the_backend_folder_is_reused_and_renewed_when_the_wheel_moved(tmp_path):
    """Bytecode that Python writes does not renew the folder, which another server may be reading."""
    wheel = environment.find_wheel()
    folder = environment.build_backend_directory(wheel, tmp_path) / "python"
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import triton_python_backend_utils"
    subprocess.run([sys.executable, "-I", "-c", code], check=False, capture_output=True)  # it fails outside of tritonserver
    inode = folder.stat().st_ino
    assert (environment.build_backend_directory(wheel, tmp_path) / "python").stat().st_ino == inode
    stub = folder / "triton_python_backend_stub"
    stub.unlink()
    stub.symlink_to(tmp_path / "an-older-wheel")
    assert (environment.build_backend_directory(wheel, tmp_path) / "python" / stub.name).resolve() == wheel.stub.resolve()


def test_server_environment_puts_libpython_first_and_ignores_the_callers_python(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    wheel = environment.find_wheel()
    env = environment.build_server_env(wheel, threads=2)
    first, second, *rest = env["LD_LIBRARY_PATH"].split(":")
    assert (Path(first) / f"libpython{environment.PYTHON_VERSION}.so.1.0").exists()
    assert (Path(second), rest) == (wheel.libraries, ["/mine"])
    assert "PYTHONPATH" not in env
    assert env["PATH"].split(":")[0] == str(Path(sys.prefix) / "bin")
    assert {env[name] for name in environment.THREAD_VARIABLES} == {"2"}


def test_perf_analyzer_runs():
    try:
        ctypes.CDLL("libb64.so.0d")
    except OSError:
        pytest.skip("perf_analyzer needs libb64-0d, which make setup could not install with apt here")
    told = subprocess.run(
        ["perf_analyzer", "--version"], env=environment.build_perf_analyzer_env(), capture_output=True, text=True
    )
    assert "2.51.0" in told.stdout + told.stderr


def test_missing_packages_are_named(monkeypatch):
    for name in ("pytriton", "nvidia.cuda_runtime"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(ServerError, match=r"nvidia-pytriton, which carries tritonserver, is not installed. Run `make setup`"):
        environment.find_wheel()
    with pytest.raises(ServerError, match="nvidia-cuda-runtime-cu12, which perf_analyzer needs, is missing"):
        environment.build_perf_analyzer_env()


def test_a_wheel_without_a_stub_for_this_python(monkeypatch, tmp_path):
    (tmp_path / "tritonserver" / "python_backend_stubs" / "3.8").mkdir(parents=True)
    package = ModuleType("pytriton")
    package.__spec__ = ModuleSpec("pytriton", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setitem(sys.modules, "pytriton", package)
    with pytest.raises(ServerError, match=rf"no stub for Python {environment.PYTHON_VERSION}; it carries 3\.8"):
        environment.find_wheel()


def test_no_libpython(monkeypatch):
    monkeypatch.setattr(environment, "PYTHON_VERSION", "3.99")
    with pytest.raises(ServerError, match=r"need libpython3\.99\.so\.1\.0, which is neither in"):
        environment.find_libpython_directory()


@pytest.mark.parametrize("variable", ["NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"])
def test_a_folder_that_cannot_keep_compiled_loops_is_told(tmp_path, monkeypatch, variable):
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "user"))
    assert environment.describe_unwritable_cache() == ""
    (tmp_path / "file").touch()
    monkeypatch.setenv(variable, str(tmp_path / "file" / "user"))  # cannot be made, also by root
    assert f"compiled loops cannot be kept in {tmp_path / 'file' / 'user'}" in environment.describe_unwritable_cache()
