"""setup.sh with interpreters that only tell how they were called: which one it takes, and when it has nothing to do."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from server.environment import PROJECT

# Of a machine that lacks nothing: `-m venv` makes a .venv of itself, everything else succeeds without a word.
INTERPRETER = """#!/bin/bash
echo "$(basename "$0") $*" >> calls
if [ "$1 $2" = "-m venv" ]; then
  mkdir -p .venv/bin && cp "$0" .venv/bin/python && printf 'executable = %s\\n' "$0" > .venv/pyvenv.cfg
  printf '#!/bin/sh\\n[ "$1" = --version ] && echo "uv UV_VERSION" || echo "uv $*" >> calls\\n' > .venv/bin/uv
  chmod +x .venv/bin/uv
fi
"""


@pytest.fixture
def checkout(tmp_path):
    """setup.sh, the Makefile and some requirements, on a machine whose python3.11 does not run."""
    for name in ("setup.sh", "Makefile"):
        shutil.copy(PROJECT / name, tmp_path)
    (tmp_path / "requirements.txt").write_text("numpy\n")
    (version,) = (
        line.partition("=")[2] for line in (PROJECT / "setup.sh").read_text().splitlines() if line.startswith("UV_VERSION=")
    )
    (tmp_path / "bin").mkdir()
    write_program(tmp_path / "bin" / "python3.11", "#!/bin/sh\nexit 127\n")
    (tmp_path / "opt").mkdir()
    write_program(tmp_path / "opt" / "mine", INTERPRETER.replace("UV_VERSION", version))
    return tmp_path


def write_program(path, text):
    path.write_text(text)
    path.chmod(0o755)


def call(checkout, *command, **variables):
    """-> how it ended, and the calls of interpreters and of uv meanwhile."""
    (checkout / "calls").write_text("")
    ours = ("PYTHON", "VENV", "MAKEFLAGS", "MAKEOVERRIDES")
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    clean |= {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=checkout, env=clean | variables, capture_output=True, text=True)
    return done, (checkout / "calls").read_text().splitlines()


def installed(calls):
    return [line for line in calls if line.startswith("uv pip install")]


def test_a_machine_without_python_is_told_what_to_set(checkout):
    done, _ = call(checkout, "./setup.sh")
    assert done.returncode == 1
    assert "no python3.11 on PATH" in done.stderr
    assert "set PYTHON=/path/to/python3.11" in done.stderr


@pytest.mark.parametrize("given", ["argument", "environment"])
def test_make_hands_the_interpreter_on_and_needs_it_once(checkout, given):
    mine = str(checkout / "opt" / "mine")
    arguments, variables = ([f"PYTHON={mine}"], {}) if given == "argument" else ([], {"PYTHON": mine})
    done, calls = call(checkout, "make", "setup", *arguments, **variables)
    assert (done.returncode, len(installed(calls))) == (0, 1), done.stderr
    assert "mine -m venv --clear .venv" in calls
    done, calls = call(checkout, "make", "setup")
    assert (done.returncode, calls) == (0, ["python -c "])  # whether .venv runs


def test_other_requirements_are_installed_with_what_made_the_environment(checkout):
    call(checkout, "./setup.sh", PYTHON=str(checkout / "opt" / "mine"))
    (checkout / "requirements.txt").write_text("scipy\n")
    done, calls = call(checkout, "./setup.sh")
    assert (done.returncode, len(installed(calls))) == (0, 1), done.stderr
    assert "mine -c " in calls


def test_an_environment_whose_interpreter_is_gone_names_the_usual_one(checkout):
    call(checkout, "./setup.sh", PYTHON=str(checkout / "opt" / "mine"))
    (checkout / "opt" / "mine").unlink()
    (checkout / "requirements.txt").write_text("scipy\n")
    done, _ = call(checkout, "./setup.sh")
    assert done.returncode == 1
    assert "no python3.11 on PATH" in done.stderr


def test_what_make_calls_is_of_the_environment_whatever_python_is(checkout):
    done, _ = call(checkout, "make", "--dry-run", "check", "PYTHON=/usr/local/bin/python3.11")
    assert ".venv/bin/python -m export check" in done.stdout
