"""setup.sh with interpreters that only record how they were called: which one it takes, and when it has nothing to do."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from server.start.environment import PROJECT

# An interpreter on a machine that lacks nothing: it says its version, `-m venv` copies it into .venv, the rest succeeds.
INTERPRETER = """#!/bin/bash
case "$*" in *sys.version_info*) echo VERSION; exit ;; esac
echo "$(basename "$0") $*" >> calls
if [ "$1 $2" = "-m venv" ]; then
  mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && printf 'executable = %s\\n' "$0" > "$4/pyvenv.cfg"
  cp bin/fake-uv "$4/bin/uv"
fi
"""
# uv that "downloads" the interpreter opt/downloaded, unless the machine is offline.
UV = """#!/bin/sh
case "$*" in
  --version) echo "uv UV_VERSION" ;;
  "python dir") echo "$PWD/opt" ;;
  "python find"*) echo "$PWD/opt/downloaded" ;;
  "python install"*) echo "uv $*" >> calls; [ ! -e offline ] ;;
  *) echo "uv $*" >> calls ;;
esac
"""
WITHOUT_VENV = """#!/bin/sh
case "$*" in
  "-m venv"*) exit 1 ;;
  "-m pip"*) echo "python3 $*" >> calls; mkdir -p .run/uv/bin && cp bin/fake-uv .run/uv/bin/uv ;;
esac
"""
BROKEN = "#!/bin/sh\nexit 127\n"  # what a pyenv shim does for a version that is not active


@pytest.fixture
def checkout(tmp_path):
    """Return a folder with setup.sh, the Makefile and requirements, on whose PATH neither python3.11 nor python3.12 runs."""
    for name in ("setup.sh", "Makefile"):
        shutil.copy(PROJECT / name, tmp_path)
    for folder in ("requirements", "bin", "opt"):
        (tmp_path / folder).mkdir()
    write_requirements(tmp_path, "numpy")
    (version,) = (
        line.partition("=")[2] for line in (PROJECT / "setup.sh").read_text().splitlines() if line.startswith("UV_VERSION=")
    )
    for name in ("python3.11", "python3.12"):
        write_program(tmp_path / "bin" / name, BROKEN)
    write_program(tmp_path / "bin" / "fake-uv", UV.replace("UV_VERSION", version))
    write_program(tmp_path / "bin" / "python3", INTERPRETER.replace("VERSION", "3.13"))
    write_program(tmp_path / "opt" / "mine", INTERPRETER.replace("VERSION", "3.11"))
    write_program(tmp_path / "opt" / "other", INTERPRETER.replace("VERSION", "3.12"))
    write_program(tmp_path / "opt" / "downloaded", INTERPRETER.replace("VERSION", "3.12"))
    return tmp_path


def write_program(path, text):
    path.write_text(text)
    path.chmod(0o755)


def write_requirements(checkout, text):
    (checkout / "requirements" / "dev.txt").write_text(text + "\n")


def call(checkout, *command, **variables):
    """Run `command` in the checkout; return the finished process and the calls of interpreters and of uv meanwhile."""
    (checkout / "calls").write_text("")
    ours = ("PYTHON", "VENV", "MAKEFLAGS", "MAKEOVERRIDES", "FOR_TESTS")
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    system = [folder for folder in os.environ["PATH"].split(os.pathsep) if not os.path.exists(os.path.join(folder, "uv"))]
    clean |= {"PATH": os.pathsep.join([str(checkout / "bin"), *system])}
    done = subprocess.run(command, cwd=checkout, env=clean | variables, capture_output=True, text=True)
    return done, (checkout / "calls").read_text().splitlines()


def installed(calls):
    return [line for line in calls if line.startswith("uv pip install")]


def set_up(checkout, *command, **variables):
    """Run `command`, or else setup.sh, which must succeed and install the packages once; return the calls meanwhile."""
    done, calls = call(checkout, *(command or ("./setup.sh",)), **variables)
    assert (done.returncode, len(installed(calls))) == (0, 1), done.stderr
    return calls


def fail(checkout, **variables):
    """Run setup.sh, which must fail and install nothing; return what it says."""
    done, calls = call(checkout, "./setup.sh", **variables)
    assert (done.returncode, installed(calls)) == (1, [])
    return done.stderr


@pytest.mark.parametrize(
    ("names", "taken"),
    [(["python3.11", "python3.12"], "python3.11"), (["python3.12"], "python3.12"), (["python3.11"], "python3.11")],
)
def test_a_supported_python_on_path_is_taken_and_the_older_one_first(checkout, names, taken):
    for name in names:
        write_program(checkout / "bin" / name, INTERPRETER.replace("VERSION", name.removeprefix("python")))
    calls = set_up(checkout)
    assert f"{taken} -m venv --clear .venv" in calls
    assert not [line for line in calls if line.startswith("uv python install")]


def test_a_machine_without_a_supported_python_downloads_one_and_says_so(checkout):
    done, calls = call(checkout, "./setup.sh")
    assert (done.returncode, len(installed(calls))) == (0, 1), done.stderr
    assert "no python3.11 or python3.12 is on PATH: uv downloads CPython 3.12" in done.stderr
    assert "uv python install --no-bin 3.12" in calls
    assert "downloaded -m venv --clear .venv" in calls


def test_a_release_candidate_is_left_alone(checkout):
    """Ubuntu 22.04 has one of Python 3.11."""
    write_program(checkout / "bin" / "python3.11", INTERPRETER.replace("VERSION", "3.11 candidate"))
    calls = set_up(checkout)
    assert "downloaded -m venv --clear .venv" in calls
    said = fail(checkout, PYTHON=str(checkout / "bin" / "python3.11"))
    assert "is Python 3.11 candidate; the pinned packages need CPython 3.11 or 3.12" in said


def test_a_download_that_fails_says_what_to_do(checkout):
    (checkout / "offline").touch()
    said = fail(checkout)
    assert "uv could not download CPython 3.12" in said
    assert "Install CPython 3.11 or 3.12" in said
    assert "set PYTHON=/path/to/python" in said
    assert "UV_PYTHON_INSTALL_MIRROR" in said


@pytest.mark.parametrize("given", ["bin/python3", "opt/nowhere"])
def test_an_interpreter_that_does_not_serve_is_refused(checkout, given):
    said = fail(checkout, PYTHON=str(checkout / given))
    assert str(checkout / given) in said
    assert "set PYTHON=/path/to/python" in said


@pytest.mark.parametrize("given", ["argument", "environment"])
def test_make_passes_the_interpreter_to_setup_and_needs_it_once(checkout, given):
    mine = str(checkout / "opt" / "mine")
    arguments, variables = ([f"PYTHON={mine}"], {}) if given == "argument" else ([], {"PYTHON": mine})
    calls = set_up(checkout, "make", "setup", *arguments, **variables)
    assert "mine -m venv --clear .venv" in calls
    for again in ({}, {"PYTHON": mine}):
        done, calls = call(checkout, "make", "setup", **again)
        assert (done.returncode, calls) == (0, ["python -c "])  # whether .venv runs


def test_an_interpreter_of_another_version_makes_the_environment_anew(checkout):
    call(checkout, "./setup.sh", PYTHON=str(checkout / "opt" / "mine"))
    calls = set_up(checkout, PYTHON=str(checkout / "opt" / "other"))
    assert "other -m venv --clear .venv" in calls


def test_other_requirements_are_installed_into_the_environment_that_exists(checkout):
    call(checkout, "./setup.sh", PYTHON=str(checkout / "opt" / "mine"))
    write_requirements(checkout, "scipy")
    calls = set_up(checkout)
    assert not [line for line in calls if "-m venv" in line]


@pytest.mark.parametrize("has_venv", [True, False])
def test_uv_is_installed_by_its_hash(checkout, has_venv):
    """Both the one that downloads an interpreter, where need be without an environment of its own, and that of .venv."""
    by_hash = "-q --no-deps --require-hashes -r requirements/uv.txt"
    if not has_venv:
        write_program(checkout / "bin" / "python3", WITHOUT_VENV)
    _, calls = call(checkout, "./setup.sh")
    expected = f"python -m pip install {by_hash}" if has_venv else f"python3 -m pip install --target .run/uv {by_hash}"
    assert [line for line in calls if "pip install" in line and not line.startswith("uv ")] == [expected]
    write_program(checkout / ".venv" / "bin" / "uv", UV.replace("UV_VERSION", "0.1.0"))
    write_requirements(checkout, "scipy")
    _, calls = call(checkout, "./setup.sh")
    assert f"python -m pip install {by_hash}" in calls


def test_only_tests_need_a_browser_and_its_absence_stops_nothing(checkout):
    system = checkout / "system"
    system.mkdir()
    for program in os.scandir("/usr/bin"):
        if "chrom" not in program.name:
            (system / program.name).symlink_to(program.path)
    write_program(checkout / "bin" / "id", "#!/bin/sh\necho 0\n")  # of root
    write_program(checkout / "bin" / "apt-get", '#!/bin/sh\necho "apt-get $*" >> calls\nexit 1\n')
    path = os.pathsep.join([str(checkout / "bin"), str(system)])
    done, calls = call(checkout, "./setup.sh", PATH=path)
    assert (done.returncode, [line for line in calls if "chromium" in line]) == (0, []), done.stderr
    done, calls = call(checkout, "make", "setup", "FOR_TESTS=1", PATH=path)
    assert (done.returncode, len(installed(calls))) == (0, 1), done.stderr
    assert any("install -y --no-install-recommends chromium chromium-driver" in line for line in calls)
    assert "going on without Chromium: the tests of the console are skipped." in done.stderr
    _, calls = call(checkout, "make", "setup", "FOR_TESTS=1", PATH=path)
    assert installed(calls) == []


def test_an_environment_whose_interpreter_is_gone_is_made_with_another_one(checkout):
    call(checkout, "./setup.sh", PYTHON=str(checkout / "opt" / "mine"))
    (checkout / "opt" / "mine").unlink()
    write_program(checkout / ".venv" / "bin" / "python", BROKEN)
    calls = set_up(checkout)
    assert "downloaded -m venv --clear .venv" in calls


def test_make_runs_the_python_of_the_environment_whatever_PYTHON_says(checkout):
    done, _ = call(checkout, "make", "--dry-run", "check", "PYTHON=/usr/local/bin/python3.11")
    assert ".venv/bin/python -m export check" in done.stdout
