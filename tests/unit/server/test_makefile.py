"""`make run` names the server that it started and asks the right users. Nothing is run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from server.start.environment import PROJECT

OURS = ("MAKEFLAGS", "MAKEOVERRIDES", "GRPC_PORT", "DATA", "USERS", "PROFILE", "LAYOUT", "TRITON", "REPO", "CONFIG")


def run_make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make in a folder, without the variables of the caller's own environment."""
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    return subprocess.run(["make", *arguments], cwd=folder, env=clean, capture_output=True, text=True)


@pytest.mark.parametrize(("given", "told"), [([], "make stop"), (["GRPC_PORT=9001"], "make stop GRPC_PORT=9001")])
def test_run_ends_with_how_to_stop_the_server_it_started_and_no_other(given, told):
    assert f'echo "Stop it:  {told}"' in run_make(PROJECT, "--dry-run", "run", *given).stdout.splitlines()


@pytest.fixture
def make(tmp_path):
    """make(lines of a bash script that stands for Python, make's arguments…) in a folder with nothing but the Makefile"""
    (tmp_path / "setup.sh").write_text("#!/bin/sh\n")
    (tmp_path / "setup.sh").chmod(0o755)
    shutil.copy(PROJECT / "Makefile", tmp_path)

    def run(lines: str, *arguments: str) -> None:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/bash\n{lines}")
        python.chmod(0o755)
        run_make(tmp_path, *arguments, f"PY={python}").check_returncode()

    return run


@pytest.fixture
def asked(make, tmp_path):
    """asked(make variables) -> the users that `make run` asks; the repository knows three"""
    known, asked = tmp_path / "known", tmp_path / "asked"
    known.write_text("7\nanna b\n9\n")
    lines = f'[ "$3" != users ] || cat {known} || exit 1\n[ "$3" != recommend ] || printf "%s\\n" "${{*: -3:1}}" >> {asked}\n'

    def run(*variables: str) -> list[str]:
        make(lines, "run", f"REPO={tmp_path / 'repository'}", *variables)
        return asked.read_text().splitlines()

    return run


@pytest.mark.parametrize(
    ("variables", "users"),
    [
        ([], ["17850", "12583", "14911", "999999999"]),
        (["DATA=another"], ["7", "anna b", "9", "999999999"]),
        (["DATA=another", "USERS=1 'anna c'"], ["1", "anna c"]),
    ],
)
def test_run_asks_users_that_the_data_set_knows_or_those_that_are_named(asked, variables, users):
    assert asked(*variables) == users


def test_run_fails_and_asks_nobody_when_the_users_cannot_be_read(asked, tmp_path):
    (tmp_path / "known").unlink()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        asked("DATA=another")
    assert f"{tmp_path / 'known'}: No such file" in failed.value.stderr
    assert not (tmp_path / "asked").exists()


@pytest.fixture
def exported(make, tmp_path):
    """exported(make variables) -> the options of the export by `make run`; "" when the repository was up to date"""
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "export.txt").touch()
    (tmp_path / "other.toml").touch()
    exports = tmp_path / "exports"
    lines = (
        f'[ "$2 $3" != "export build" ] || {{ echo "${{@:4}}" > {exports}; mkdir -p "${{11}}/recommend"; }}\n'
        '[ "$3" != users ] || echo 7\n'
    )

    def run(*variables: str) -> str:
        exports.write_text("")
        make(lines, "run", "DATA=shop", *variables)
        return exports.read_text().strip()

    return run


@pytest.mark.parametrize(
    ("variable", "option"), [("CONFIG=other.toml", "--config other.toml"), ("TRITON=modern", "--triton modern")]
)
def test_run_exports_again_with_other_settings_and_only_then(exported, variable, option):
    plain = "--data shop --profile cpu --layout ensemble --repo model_repository"
    assert exported() == plain
    assert exported() == ""
    assert exported(variable) == f"{plain} {option}"
    assert exported(variable) == ""
    assert exported() == plain  # meanwhile the repository was exported with other settings


def test_run_exports_again_into_a_repository_of_any_name(exported):
    assert exported("REPO=a:b=c")
    assert exported("REPO=a:b=c", "CONFIG=other.toml")
    assert exported("REPO=a:b=c")


@pytest.mark.parametrize("name", ["REPO", "DATA", "CONFIG"])
def test_a_path_with_a_space_is_refused_with_the_reason(name):
    refused = run_make(PROJECT, "--dry-run", "serve", f"{name}=/shops/my shop")
    assert refused.returncode == 2
    assert f'{name} is "/shops/my shop", and make takes no path with a space. Rename the folder' in refused.stderr


def test_make_in_another_folder_says_where_to_run_it(tmp_path):
    """It would find no servers there, and say that there is nothing to stop."""
    done = run_make(tmp_path, "-f", str(PROJECT / "Makefile"), "stop")
    assert done.returncode != 0
    assert f"this is {tmp_path}, which is no checkout. Run the command there: make -C {PROJECT}/ stop" in done.stderr
