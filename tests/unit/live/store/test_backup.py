"""A live store is copied while events go on; a restored one has the state of that moment, and names later events anew."""

from __future__ import annotations

import json
import stat
import threading
from contextlib import closing

import numpy as np
import pytest

from live.archive import compact, read_log
from live.backup import back_up, restore
from live.erase import erase_user, search_user
from live.exposures import Exposure, ExposureLog, digest_user
from live.replay import replay
from serving.contract.errors import ConfigError
from serving.contract.tensors import NO_SEQUENCE, OBSERVE
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.store import DATA_FILE, find_live_folder
from serving.live.writer import Writer
from serving.stages.live.models import Observe
from serving.stages.rules.applied import CURRENT_FILE
from serving.stages.rules.applied import FOLDER as RULES
from tests.processes import PROCESSES
from tests.unit.live.answers import event_inputs
from tests.unit.live.batches import KINDS, events, purchase
from tests.unit.live.commands import call_in_one_line
from tests.unit.live.twin import StateTwin, differences
from tests.unit.live.writing import hold_open, list_items, read_last_sequence
from tests.waiting import until


def test_a_backup_that_is_made_while_events_go_on_is_restored_as_of_one_moment(writer, folder, clock, tmp_path):
    rng, stop = np.random.default_rng(0), threading.Event()
    writer.append(events(rng, 100, ids=True))
    clock.ms += 86_400_000
    compact(writer, older_than_ms=clock.ms)

    def go_on() -> None:
        while not stop.is_set():
            writer.append(events(rng, 10, ids=True))

    posting = threading.Thread(target=go_on)
    posting.start()
    try:
        until(lambda: writer.store.read_progress().last_sequence > 150)
        written = call_in_one_line("backup", tmp_path / "backup", "--repo", tmp_path / "model_repository")
        at_backup = writer.store.read_progress().last_sequence
        until(lambda: writer.store.read_progress().last_sequence > at_backup)
    finally:
        stop.set()
        posting.join()
    assert stat.S_IMODE((tmp_path / "backup").stat().st_mode) == 0o700
    restored = call_in_one_line("restore", tmp_path / "backup", "--repo", tmp_path / "other")
    place = tmp_path / "other.live"
    last = read_last_sequence(place)
    assert 150 < last <= at_backup
    assert f"events up to place {last:,} of the log" in written
    assert "1 segments of the archive" in written
    assert f"events up to place {last:,} of the log" in restored
    log = {
        int(sequence): batch.take(np.array([row]))
        for sequences, batch in read_log(folder)
        for row, sequence in enumerate(sequences)
    }
    twin = StateTwin()
    for sequence in range(1, last + 1):
        twin.apply(log[sequence])
    with closing(Reader(place)) as reader, reader.snapshot() as snapshot:
        assert differences(twin, snapshot, Layout()) == []
    assert replay(place).is_equal
    with closing(Writer(place, Layout(), KINDS.names, now_ms=clock)) as later:
        assert later.append(purchase(1, 2)).tolist() == [last + 1]
        assert later.append(log[last]).tolist() == [last]  # event ids came along


def test_a_restored_store_never_hands_out_the_sequence_of_an_event_that_it_lost(repository, observe, tmp_path):
    def post(stage: Observe, item: int) -> int:
        return int(stage(event_inputs(user_id=[7], item_id=[item]))["sequence"][0, 0])

    place = find_live_folder(repository)
    before = post(observe, 1)
    back_up(place, tmp_path / "backup")
    lost = [post(observe, item) for item in (2, 3)]
    restored = restore(tmp_path / "backup", tmp_path / "restored.live")
    assert restored.progress.last_sequence == 1
    with (
        closing(Observe.load(repository / OBSERVE / "1", tmp_path / "restored.live")) as stage,
        closing(Reader(tmp_path / "restored.live")) as reader,
    ):
        later = [post(stage, item) for item in (4, 5)]
        assert not {before, *lost} & set(later)
        asked = np.array([*lost, *later, NO_SEQUENCE])
        assert reader.wait_for(asked, timeout_s=0.01).tolist() == [False, False, True, True, True]


def test_what_belongs_to_a_store_is_in_its_backup(writer, folder, tmp_path):
    writer.append(purchase(7, 1))
    log = ExposureLog(folder, 1.0, keep_days=1.0, keep_bytes=1 << 30)
    log.add(Exposure("r0", 1_000, 7, 3, [10, 11], [0.5, None], []))
    log.close()
    erase_user(writer, 8)
    (folder / "rules" / "2").mkdir(parents=True)
    (folder / "rules" / ".3").mkdir()
    for name in ("rules/current.json", "rules/2/version.json", "rules/.3/version.json", "experiment.json"):
        (folder / name).write_text("{}")
    back_up(folder, tmp_path / "backup")
    files = {str(path.relative_to(tmp_path / "backup")) for path in (tmp_path / "backup").rglob("*") if path.is_file()}
    [exposures] = [name for name in files if name.startswith("exposures/exposures-")]
    expected = {DATA_FILE, "erasures.jsonl", "rules/current.json", "rules/2/version.json", exposures, "exposures/erased.jsonl"}
    assert files == expected


def test_a_store_that_a_process_uses_is_not_replaced(folder, replaceable):
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=hold_open, args=(folder, theirs))
    process.start()
    try:
        assert ours.recv()
        with pytest.raises(ConfigError, match="A process uses the live store"):
            restore(replaceable, folder, replace=True)
    finally:
        ours.send(True)
        process.join()
    assert list_items(folder) == [1, 2]
    with pytest.raises(ConfigError, match="Add --replace"):
        restore(replaceable, folder)
    assert list_items(folder) == [1, 2]


def test_a_store_that_is_replaced_is_kept(folder, replaceable, tmp_path):
    repo = tmp_path / "model_repository"
    for number in (1, 2):
        shown = call_in_one_line("restore", replaceable, "--repo", repo, "--replace")
        assert f"the store that was there is in {folder}/replaced-{number}" in shown
        assert list_items(folder) == [1]
    assert (list_items(folder / "replaced-1"), list_items(folder / "replaced-2")) == ([1, 2], [1])
    with closing(Writer(folder, Layout(), KINDS.names)) as writer:
        writer.append(purchase(7, 3))
        back_up(folder, tmp_path / "again")
    assert not (tmp_path / "again" / "replaced-1").exists()


def test_rules_that_were_applied_after_the_backup_are_told(folder, tmp_path):
    """They no longer hold: an item that they block would be shown again without a word."""
    with closing(Writer(folder, Layout(), KINDS.names)):
        back_up(folder, tmp_path / "without")
        (folder / RULES).mkdir()
        (folder / RULES / CURRENT_FILE).write_text('{"version": 4}')
        back_up(folder, tmp_path / "with")
    restore = ("--repo", tmp_path / "model_repository", "--replace")
    assert "the rules are" not in call_in_one_line("restore", tmp_path / "with", *restore)
    said = call_in_one_line("restore", tmp_path / "without", *restore)
    assert "the rules are those of the backup again (as exported), and were version 4, which is in" in said
    assert "replaced-2/rules/4. Apply them again" in said


def test_users_who_were_erased_after_the_backup_are_erased_from_the_restored_store(folder, tmp_path):
    with closing(Writer(folder, Layout(), KINDS.names)) as writer:
        for user in (7, 8, 9):
            writer.append(purchase(user, 1))
        erase_user(writer, 9)
        writer.append(purchase(9, 2))  # who came back
        compact(writer, older_than_ms=writer.now_ms() + 1)
        back_up(folder, tmp_path / "backup")
        erase_user(writer, 8)
    shown = call_in_one_line("restore", tmp_path / "backup", "--repo", tmp_path / "model_repository", "--replace")
    assert "erased again, because they were erased after the backup: 1 users" in shown
    assert not any(search_user(folder, 8).values())
    assert (search_user(folder, 7)["events"], search_user(folder, 9)["events"]) == (1, 1)
    digests = [json.loads(proof)["user_digest"] for proof in (folder / "erasures.jsonl").read_text().splitlines()]
    assert digests == [digest_user(user) for user in (9, 8, 8)]  # the second time from the restored store
    assert replay(folder).is_equal


@pytest.mark.parametrize(
    "line", ['{"user_digest": "2c62', "12", "null", "[]", "{}", '{"user_digest": null}', '{"user_digest": []}']
)
def test_a_proof_of_an_erasure_that_a_crash_cut_short_loses_no_other(folder, tmp_path, caplog, line):
    with closing(Writer(folder, Layout(), KINDS.names)) as writer:
        writer.append(purchase(8, 1))
        back_up(folder, tmp_path / "backup")
        (folder / "erasures.jsonl").write_text(line)
        erase_user(writer, 8)
    assert restore(tmp_path / "backup", folder, replace=True).erased == 1
    assert not any(search_user(folder, 8).values())
    assert caplog.messages == [
        f"{folder}/erasures.jsonl, line 1 is no proof, and is skipped. Erase that user again, if nobody did."
    ]


def test_users_who_were_erased_stay_so_where_the_backup_does_not_hold_them(folder, tmp_path):
    with closing(Writer(folder, Layout(), KINDS.names)) as writer:
        writer.append(purchase(7, 1))
        back_up(folder, tmp_path / "without")
        writer.append(purchase(8, 1))
        back_up(folder, tmp_path / "with")
        erase_user(writer, 8)
    assert restore(tmp_path / "without", folder, replace=True).erased == 0
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        assert snapshot.find_erased(np.array([7, 8])).tolist() == [False, True]
    assert restore(tmp_path / "with", folder, replace=True).erased == 1
    assert (search_user(folder, 7)["events"], any(search_user(folder, 8).values())) == (1, False)


def test_a_damaged_store_is_replaced_once_its_data_file_is_moved_away(folder, tmp_path):
    with closing(Writer(folder, Layout(), KINDS.names)) as writer:
        writer.append(purchase(8, 1))
        back_up(folder, tmp_path / "backup")
        erase_user(writer, 8)
    (folder / DATA_FILE).write_bytes(bytes(8_192))
    with pytest.raises(ConfigError, match=r"marks of erased users in .*/data.mdb cannot be read.*Move this file away"):
        restore(tmp_path / "backup", folder, replace=True)
    (folder / DATA_FILE).rename(tmp_path / DATA_FILE)
    assert restore(tmp_path / "backup", folder, replace=True).erased == 1


def test_a_backup_needs_an_empty_folder_and_a_restore_a_complete_backup(writer, folder, tmp_path):
    writer.append(purchase(7, 1))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        back_up(folder, tmp_path / "full")
    with pytest.raises(ConfigError, match="in the live store itself"):
        back_up(folder, folder / "backup")
    with pytest.raises(ConfigError, match="holds no complete backup"):
        restore(tmp_path / "full", tmp_path / "other.live")
    assert not (tmp_path / "other.live").exists()


def test_a_backup_of_another_shop_or_a_damaged_one_leaves_the_store_as_it_is(folder, tmp_path):
    with closing(Writer(tmp_path / "books.live", Layout(), KINDS.names, shop="books")) as writer:
        writer.append(purchase(7, 1))
        back_up(tmp_path / "books.live", tmp_path / "backup")
    with closing(Writer(folder, Layout(), KINDS.names, shop="films")) as writer:
        writer.append(purchase(7, 2))
    with pytest.raises(ConfigError, match="events of 'books', and the repository serves 'films'"):
        restore(tmp_path / "backup", folder, "films", replace=True)
    (tmp_path / "backup" / DATA_FILE).write_bytes(bytes(8_192))
    with pytest.raises(ConfigError, match="is not in the format of LMDB"):
        restore(tmp_path / "backup", folder, "books", replace=True)
    assert list_items(folder) == [2]
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == []
