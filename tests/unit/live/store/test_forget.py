"""Columns that `upsert` set of items have an age, and can be forgotten, so that the data set's values count again."""

from __future__ import annotations

from contextlib import closing

import pytest

from live.archive import compact, read_log
from live.erase import erase_user, search_user
from live.forget import forget_items
from live.replay import replay
from serving.contract.errors import ConfigError
from serving.live.events import ITEM_CHANGED, USER_CHANGED
from serving.live.reader import Reader
from serving.pipeline import Pipeline
from tests.unit.live.answers import answer, upserted
from tests.unit.live.batches import START_MS, change, purchase
from tests.unit.live.commands import call, call_in_one_line

DAY_MS = 86_400_000


def read_columns(folder) -> dict[int, dict]:
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        return {change.id: change.columns for change in snapshot.read_changes(after=0)}


def test_columns_that_are_older_than_a_moment_are_forgotten_and_newer_ones_stay(writer, folder, clock, tmp_path):
    writer.append(change(ITEM_CHANGED, 1, price=9.5, available=False))
    writer.append(change(ITEM_CHANGED, 2, price=7.5))
    clock.ms += 2 * DAY_MS
    writer.append(change(ITEM_CHANGED, 1, price=8.5))
    writer.append(change(USER_CHANGED, 1, country="FR"))
    repo = ("--repo", tmp_path / "model_repository")
    shown = call_in_one_line("inspect", "--item", 1, *repo)
    assert "available │ false │ 2023-11-14 22:13:20 UTC" in shown
    assert "price │ 8.5 │ 2023-11-16 22:13:20 UTC" in shown
    assert "changed by upsert 3, the oldest column 2023-11-14 22:13:20 UTC" in call_in_one_line("inspect", *repo)
    assert "columns forgotten: available 1, price 1" in call_in_one_line("forget", "--items-before", "2023-11-15", *repo)
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        left = [(change.type, change.id, change.columns) for change in snapshot.read_changes(after=0)]
    assert left == [(ITEM_CHANGED, 1, {"price": 8.5}), (USER_CHANGED, 1, {"country": "FR"})]
    assert "columns forgotten: none" in call_in_one_line("forget", "--items-before", "2023-11-15T12:00:00", *repo)
    assert "Upsert has set no column" in call_in_one_line("inspect", "--item", 2, *repo)
    assert 'country │ "FR" │ 2023-11-16' in call_in_one_line("inspect", "--user", 1, *repo)
    both = call_in_one_line("inspect", "--user", 1, "--item", 1, *repo)
    assert 'country │ "FR"' in both
    assert "price │ 8.5" in both


def test_a_moment_that_is_yet_to_come_forgets_nothing(writer, folder, tmp_path):
    """Such as a mistyped year: every column of every item was set before it."""
    writer.append(change(ITEM_CHANGED, 1, price=9.5))
    with pytest.raises(ConfigError, match="in the future"):
        call_in_one_line("forget", "--items-before", "2203-11-15", "--repo", tmp_path / "model_repository")
    assert read_columns(folder) == {1: {"price": 9.5}}


def test_named_items_are_forgotten_and_can_be_set_again(writer, folder, tmp_path):
    for item in (1, 2, 3):
        writer.append(change(ITEM_CHANGED, item, price=9.5))
    repo = ("--repo", tmp_path / "model_repository")
    said = call_in_one_line("forget", "--item", 1, "--item", 3, *repo)
    assert "columns forgotten: price 2 A running server keeps the forgotten values until it loads another" in said
    assert read_columns(folder) == {2: {"price": 9.5}}
    said = call_in_one_line("forget", "--item", 2, "--item", 1, "--item", 4, *repo, code=1)
    assert "columns forgotten: price 1 warning: upsert has set no column of 1, 4." in said
    writer.append(change(ITEM_CHANGED, 1, price=7.5))
    assert read_columns(folder) == {1: {"price": 7.5}}
    for arguments in ((), ("--item", 1, "--items-before", "2023-11-15")):
        with pytest.raises(ConfigError, match="Expected either --item"):
            call("forget", *arguments, *repo)


def test_forgetting_is_replayed_at_its_place_and_is_no_event_of_anybody(writer, folder, clock):
    writer.append(change(ITEM_CHANGED, 1, price=9.5, available=False))
    writer.append(purchase(0, 1))
    forget_items(writer, before_ms=START_MS + 1)
    writer.append(change(ITEM_CHANGED, 1, available=True))
    writer.append(change(ITEM_CHANGED, 2, price=7.5))
    progress = writer.store.read_progress()
    assert (progress.last_sequence, progress.accepted, progress.changed_sequence) == (5, 4, 5)
    assert replay(folder).is_equal
    compact(writer, older_than_ms=clock.ms + 1)
    assert [sequence for sequences, _ in read_log(folder) for sequence in sequences.tolist()] == [1, 2, 3, 4, 5]
    assert replay(folder).is_equal
    assert not any(erase_user(writer, 0).left.values())  # the events of items have no user
    assert search_user(folder, 0)["events"] == 0
    assert read_columns(folder) == {1: {"available": True}, 2: {"price": 7.5}}


def test_a_pipeline_that_is_loaded_after_the_forgetting_answers_as_the_generation_says(repository, upsert, reader):
    before = answer(Pipeline.load(repository, live=reader), [7])["item_ids"]
    first = int(before[0, 0])
    upserted(upsert, first, available=False)
    upserted(upsert, 1_000, kind="book", price=2.0)
    assert first not in answer(Pipeline.load(repository, live=reader), [7])["item_ids"]
    forget_items(upsert.writer)
    assert answer(Pipeline.load(repository, live=reader), [7])["item_ids"].tolist() == before.tolist()
