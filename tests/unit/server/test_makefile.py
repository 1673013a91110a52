"""What make says about the server it started, without running any of it, and whom it asks."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from server.environment import PROJECT


@pytest.mark.parametrize(("given", "told"), [([], "make stop"), (["GRPC_PORT=9001"], "make stop GRPC_PORT=9001")])
def test_run_ends_with_how_to_stop_the_server_it_started_and_no_other(given, told):
    clean = {name: value for name, value in os.environ.items() if name not in ("GRPC_PORT", "MAKEFLAGS", "MAKEOVERRIDES")}
    dry = ["make", "--dry-run", "run", *given]
    printed = subprocess.run(dry, cwd=PROJECT, env=clean, capture_output=True, text=True, check=True).stdout
    assert f'echo "Stop it:  {told}"' in printed.splitlines()


@pytest.fixture
def asked(tmp_path):
    """make variables -> which users `make run` asks, of a repository that knows three."""
    python, known, asked = (tmp_path / name for name in ("python", "known", "asked"))
    known.write_text("7\nanna b\n9\n")
    python.write_text(
        f'#!/bin/bash\n[ "$3" != users ] || cat {known} || exit 1\n'
        f'[ "$3" != recommend ] || printf "%s\\n" "${{*: -3:1}}" >> {asked}\n'
    )
    python.chmod(0o755)
    (tmp_path / "setup.sh").write_text("#!/bin/sh\n")
    (tmp_path / "setup.sh").chmod(0o755)
    shutil.copy(PROJECT / "Makefile", tmp_path)

    def run(*variables: str) -> list[str]:
        command = ["make", "run", f"PY={python}", f"REPO={tmp_path / 'repository'}", *variables]
        ours = ("MAKEFLAGS", "MAKEOVERRIDES", "DATA", "USERS")
        clean = {name: value for name, value in os.environ.items() if name not in ours}
        subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, check=True)
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
    assert f"{tmp_path / 'known'}: No such file" in failed.value.stderr.decode()
    assert not (tmp_path / "asked").exists()
