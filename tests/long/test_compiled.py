"""Compiled code is found again from any copy of the sources, and no damage to it stops a process."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from serving.loops.compiled import KEPT_FOLDERS, NAME, find_entry_point
from serving.loops.hashing import mix_all

SERVING = Path(__file__).parents[2] / "serving"
PROGRAM = """
import numpy as np
from serving.loops.hashing import mix_all as loop
print(loop(np.arange(3, dtype=np.uint64))[1], sum(loop.stats.cache_hits.values()))
"""
FIND = """
from serving.loops.hashing import mix_all
print(mix_all.stats.cache_path)
"""
LOSING = """
import shutil
from serving.loops.hashing import mix_all
shutil.rmtree(mix_all.stats.cache_path.rsplit("/", 1)[0])
"""  # every folder of compiled code
HASTY = """
import serving.loops.compiled
serving.loops.compiled.WAIT_S = 0.1
"""
SOMEBODY_ELSE = """
import os
os.getuid = lambda: 4242
"""
COMPILED, FOUND = "0", "1"


def copy_code(folder: Path) -> Path:
    shutil.copytree(SERVING, folder / "serving", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A copy of the code, which nobody may change."""
    return copy_code(tmp_path_factory.mktemp("one"))


@pytest.fixture
def another(tmp_path):
    """A copy to change."""
    return copy_code(tmp_path / "another")


def start(folder: Path, cache: Path, program: str = PROGRAM, **env: str) -> subprocess.Popen[str]:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(folder)} | env
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    """Return (a hash, how many loops were found compiled), and the text on stderr."""
    printed, said = process.communicate()
    assert process.returncode == 0, said
    return printed.split(), said


def run(folder: Path, cache: Path, program: str = PROGRAM, **env: str) -> tuple[list[str], str]:
    return finish(start(folder, cache, program, **env))


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A cache in which the loop was compiled once, and the value that it gives."""
    cache = tmp_path_factory.mktemp("once") / "cache"
    (value, first), said = run(SERVING.parent, cache)
    assert (first, said) == (COMPILED, "")
    return cache, value


@pytest.fixture
def cache(once, tmp_path):
    """A copy of that cache, to change."""
    return shutil.copytree(once[0], tmp_path / "cache")


@pytest.fixture
def value(once):
    return once[1]


def test_machine_code_does_what_the_function_does():
    numbers = np.arange(5, dtype=np.uint64)
    np.testing.assert_array_equal(find_entry_point(mix_all, numbers)(numbers), mix_all(numbers))


def find_folder(code: Path, cache: Path, **env: str) -> str:
    """Return where machine code would be kept. Nothing is compiled."""
    ((folder,), said) = run(code, cache, FIND, **env)
    assert said == ""
    return folder


def test_a_copy_whose_other_modules_were_edited_finds_what_another_compiled(another, cache, value):
    for name in ("contract/tensors.py", "tables/levels/redis_store.py", "stages/features/encode.py"):
        with (another / "serving" / name).open("a") as file:
            file.write('"""A remark."""\n')
    assert run(another, cache) == ([value, FOUND], "")
    assert not list(another.rglob("*.nb*"))


def test_a_constant_from_another_module_is_part_of_the_key(another, tmp_path):
    with (another / "serving" / "loops" / "hashing.py").open("a") as file:
        file.write("from serving.contract.tensors import NULL_ROW\n")
    before = find_folder(another, tmp_path / "cache")
    tensors = another / "serving" / "contract" / "tensors.py"
    tensors.write_text(
        tensors.read_text().replace("PAD_ROW, NULL_ROW, OOV_ROW = 0, 1, 2", "PAD_ROW, NULL_ROW, OOV_ROW = 0, 7, 2")
    )
    assert find_folder(another, tmp_path / "cache") != before


def test_damaged_files_are_compiled_again_once(one, cache, value):
    for path in cache.rglob("*.nbi"):  # a damaged .nbc is noticed by the same line, and this one is read first
        path.write_bytes(path.read_bytes()[:20])
    again, said = run(one, cache)
    assert again == [value, COMPILED]
    assert "is damaged" in said
    assert run(one, cache) == ([value, FOUND], "")


def test_files_that_cannot_be_read_are_not_called_damaged(one, cache, value):
    indices = list(cache.rglob("*.nbi"))
    for path in indices:
        path.unlink()
        path.mkdir()  # nobody can read it, not even root
    again, said = run(one, cache)
    assert again == [value, COMPILED]
    assert "cannot be read (Is a directory): compiled again." in said
    assert "damaged" not in said
    assert all(path.is_dir() for path in indices)


def test_of_processes_that_start_together_one_compiles(one, value, tmp_path):
    together = [start(one, tmp_path / "cache") for _ in range(4)]
    done = [finish(process) for process in together]
    assert sorted(done) == [([value, COMPILED], ""), *[([value, FOUND], "")] * 3]


def test_a_process_that_stands_still_while_it_compiles_delays_the_others_by_a_moment(one, cache, value):
    for path in cache.rglob("*.nbi"):
        path.unlink()
    with ExitStack() as stack:
        for lock in cache.glob(f"{NAME}_*/*.lock"):
            fcntl.flock(stack.enter_context(lock.open("w")), fcntl.LOCK_EX)
        assert run(one, cache, HASTY + PROGRAM) == ([value, COMPILED], "")
    assert run(one, cache) == ([value, FOUND], "")


def test_a_lock_of_another_user_stops_nobody(one, value, tmp_path):
    cache = tmp_path / "cache"
    (cache / f"{NAME}-{os.getuid()}.lock").mkdir(parents=True)  # it cannot be opened
    kept, said = run(one, cache)
    assert kept == [value, COMPILED]
    assert "is not kept" in said
    assert run(one, cache, SOMEBODY_ELSE + PROGRAM) == ([value, COMPILED], "")
    assert list(cache.rglob("*.nbc"))


def replace_by_link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


def give_away(folder: Path) -> None:
    if os.getuid():
        pytest.skip("only root may give a folder to another user")
    os.chown(folder, 4242, 4242)


@pytest.mark.parametrize("forge", [replace_by_link, give_away, lambda folder: folder.chmod(0o777)])
def test_code_that_another_user_may_have_put_there_does_not_run(one, cache, value, forge):
    (folder,) = cache.glob(f"{NAME}_*")
    forge(folder)
    again, said = run(one, cache)
    assert again == [value, COMPILED]
    assert "is not used, because another user may have put it there" in said


def test_loops_run_where_nothing_can_be_written(one, value, tmp_path):
    (tmp_path / "file").touch()
    assert run(one, tmp_path / "file") == ([value, COMPILED], "")


def test_checked_code_is_kept_apart(one, cache):
    assert find_folder(one, cache, NUMBA_BOUNDSCHECK="1") not in {str(path.parent) for path in cache.rglob("*.nbc")}


def older_folders(cache: Path, count: int) -> list[Path]:
    """Return folders of other code, the latest used first."""
    folders = [cache / f"{NAME}_serving.loops.hashing_{number:016x}{'_checked' * (number % 2)}" for number in range(count)]
    for age, folder in enumerate(folders):
        folder.mkdir(parents=True)
        (folder / "loop.nbc").write_bytes(b"machine code")
        os.utime(folder, (10**9 - age, 10**9 - age))
    return folders


def test_new_code_replaces_the_least_recently_used(one, another, cache):
    (own,) = cache.glob(f"{NAME}_*")
    older = older_folders(cache, 12)
    strangers = [cache / f"{name}_{hashlib.sha1(b'/there').hexdigest()}" for name in ("serving", NAME)]  # numba's names
    for folder in (own, *strangers):
        folder.mkdir(exist_ok=True)
        os.utime(folder, (0, 0))
    find_folder(one, cache)  # it is used
    with (another / "serving" / "loops" / "hashing.py").open("a") as file:
        file.write("\n")
    assert run(another, cache)[0][1] == COMPILED
    (new,) = set(cache.glob(f"{NAME}_*")) - {own, *older, *strangers}
    assert [folder.exists() for folder in older] == [True] * (KEPT_FOLDERS - 2) + [False] * (12 - KEPT_FOLDERS + 2)
    assert all(list(folder.glob("*.nbc")) for folder in (own, new))
    assert all(folder.exists() for folder in strangers)


def test_a_start_whose_folder_is_removed_meanwhile_compiles_and_keeps_it(one, cache, value):
    assert run(one, cache, LOSING + PROGRAM) == ([value, COMPILED], "")
    assert list(cache.rglob("*.nbc"))
