"""The folders in memory that hold the files of tests: they go with their run, or when the next one begins."""

import fcntl

from tests import memory


def test_folders_of_runs_that_ended_are_removed_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path)
    names = (f"{memory.PREFIX}left", f"{memory.PREFIX}going", f".{memory.PREFIX}begins", "of others")
    left, going, begins, foreign = (tmp_path / name for name in names)
    for folder in (left, going, begins, foreign):
        (folder / "files").mkdir(parents=True)
        (folder / memory.LOCK_FILE).touch()
    with (going / memory.LOCK_FILE).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        memory.remove_left_folders()
    assert {path.name for path in tmp_path.iterdir()} == {going.name, begins.name, foreign.name}


def test_a_run_keeps_its_folder_until_it_removes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path)
    run = memory.FilesInMemory()
    memory.remove_left_folders()
    assert run.files.parent.is_dir()
    run.remove()
    assert list(tmp_path.iterdir()) == []


def test_without_room_the_files_go_to_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(memory, "ROOM_BYTES", 1 << 60)
    assert not memory.has_room()
    monkeypatch.setattr(memory, "ROOM_BYTES", 1)
    assert memory.has_room()
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path / "absent")
    assert not memory.has_room()
