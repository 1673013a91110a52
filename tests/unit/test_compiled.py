"""Machine code is found again wherever a copy of the code lies, and nothing that happens to it stops a process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STAGES = Path(__file__).parents[2] / "stages"
PROGRAM = """
import numpy as np
from stages.hashing import _mixed_all as loop
print(loop(np.arange(3, dtype=np.uint64))[1], sum(loop.stats.cache_hits.values()))
"""
COMPILED, FOUND = "0", "1"


@pytest.fixture
def copies(tmp_path):
    for name in ("one", "another"):
        shutil.copytree(STAGES, tmp_path / name / "stages", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run(folder: Path, cache: Path, **env: str) -> tuple[list[str], str]:
    """-> (a hash, and how many loops were found compiled), what went to stderr"""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(folder)} | env
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


def test_a_copy_of_the_code_finds_what_another_compiled(copies):
    cache = copies / "cache"
    (value, first), _ = run(copies / "one", cache)
    assert first == COMPILED
    assert run(copies / "another", cache) == ([value, FOUND], "")
    assert not list((copies / "one").rglob("*.nb*"))


def test_other_code_compiles_anew(copies):
    cache = copies / "cache"
    run(copies / "one", cache)
    with (copies / "another" / "stages" / "ids.py").open("a") as file:
        file.write("\n")
    assert run(copies / "another", cache)[0][1] == COMPILED


@pytest.mark.parametrize("suffix", ["nbc", "nbi"])
def test_damaged_files_are_compiled_again_once(copies, suffix):
    cache = copies / "cache"
    (value, _), _ = run(copies / "one", cache)
    for path in cache.rglob(f"*.{suffix}"):
        path.write_bytes(path.read_bytes()[:20])
    again, said = run(copies / "one", cache)
    assert again == [value, COMPILED]
    assert "is damaged" in said
    assert run(copies / "one", cache) == ([value, FOUND], "")


def test_where_nothing_can_be_written_it_works(copies):
    (copies / "file").touch()
    (value, first), said = run(copies / "one", copies / "file")
    assert (first, said) == (COMPILED, "")
    assert value == run(copies / "one", copies / "cache")[0][0]


def test_checked_code_is_kept_apart(copies):
    cache = copies / "cache"
    run(copies / "one", cache)
    assert run(copies / "one", cache, NUMBA_BOUNDSCHECK="1")[0][1] == COMPILED
