"""For each column, the later value of item file and `upsert` counts, if the file says when its rows were changed."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from export.continuous.continued import continue_log
from export.steps.live import find_catalogue_times
from export.steps.reserve import make_content
from gateway.published import LiveItems, Published
from serving.contract.artifacts import find_stage_folder, load_manifest, write_manifest
from serving.contract.errors import DataError
from serving.contract.tensors import STAGES
from serving.live.catalogue_times import CatalogueTimes
from serving.live.events import ITEM_CHANGED
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.store import find_live_folder
from serving.live.writer import Writer
from serving.pipeline import Pipeline
from serving.stages.live.content import Content
from tests.present import present
from tests.unit.live.answers import answer, upserted
from tests.unit.live.batches import START_MS, change
from training.dataset import Dataset, load_dataset

DAY_MS = 86_400_000
TOML = """
name = "shop"
[interactions]
path = "events.csv"
user_id = "user"
item_id = "item"
timestamp = "time"
[items]
path = "items.csv"
item_id = "item"
title = "name"
categorical = ["kind"]
price = "cost"
updated_at = "changed"
"""


def load_shop(folder: Path, *changed: str, toml: str = TOML) -> Dataset:
    """Load a shop of items 10, 11, …, whose rows were changed at these times."""
    rows = [f"{10 + row},Lamp {row},light,{row + 2.5},{moment}" for row, moment in enumerate(changed)]
    folder.mkdir(exist_ok=True)
    (folder / "dataset.toml").write_text(toml)
    (folder / "events.csv").write_text("user,item,time\n1,10,100\n2,99,200\n")
    (folder / "items.csv").write_text("\n".join(["item,name,kind,cost,changed", *rows, ""]))
    return load_dataset(folder)


@pytest.fixture
def writer(folder, clock):
    with closing(Writer(folder, Layout(), ("purchase",), now_ms=clock, shop="shop")) as writer:
        yield writer


def iso(moment_ms: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment_ms / 1_000))


def test_a_data_set_knows_when_its_rows_were_changed(tmp_path):
    dataset = load_shop(tmp_path, "2023-11-14T22:13:20Z", "", "2023-11-14T23:13:21.9+01:00")
    assert present(dataset.item_updates_s).to_dict() == {10: START_MS // 1_000, 12: START_MS // 1_000 + 1}
    times = present(find_catalogue_times(dataset))
    assert times.columns == {"title", "name", "price", "cost", "kind"}  # neither available, nor category
    assert present(load_shop(tmp_path, "", "").item_updates_s).empty
    without = load_shop(tmp_path, "", toml=TOML.replace('updated_at = "changed"', ""))
    assert without.item_updates_s is find_catalogue_times(without) is None


def test_a_row_that_was_changed_in_the_future_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"items.csv: column 'changed', row 3: '2199-01-01T00:00:00Z' is in the future"):
        load_shop(tmp_path, "2023-11-14", "2199-01-01T00:00:00Z")


def test_the_next_export_takes_the_later_of_row_and_upsert(writer, folder, clock, tmp_path):
    for item in (10, 11, 12):
        writer.append(change(ITEM_CHANGED, item, title="Vase", name="Vase", price=9.5, cost=9.5, available=False))
    clock.ms += 2 * DAY_MS
    writer.append(change(ITEM_CHANGED, 10, price=8.5, cost=8.5))
    dataset = load_shop(tmp_path / "data", iso(START_MS + DAY_MS), iso(START_MS), "")
    items = continue_log(dataset, folder).items.set_index("item_id")
    assert items["title"].tolist() == ["Lamp 0", "Vase", "Vase", "99"]
    assert items["price"].tolist()[:3] == [8.5, 9.5, 9.5]
    assert items["available"].tolist() == [False, False, False, True]  # the item file has no such column


def publish_times(repository: Path, times: CatalogueTimes) -> None:
    """Let the repository's generation have a catalogue whose rows were changed at these times."""
    for stage in STAGES:
        folder = find_stage_folder(repository, stage, 1)
        times.save(folder)
        write_manifest(folder, **load_manifest(folder))


def test_a_generation_with_a_newer_catalogue_answers_with_its_own_values(repository, upsert):
    now_s = int(time.time())
    upserted(upsert, 1, price=30.0, available=False)
    upserted(upsert, 2, price=30.0, available=False)
    columns = frozenset(["price", "unit_price", "available"])
    publish_times(repository, CatalogueTimes(np.array([1, 2]), np.array([now_s + 60, now_s - 60]), columns))
    with closing(Reader(find_live_folder(repository))) as reader:
        pipeline = Pipeline.load(repository, live=reader)
        answer(pipeline, [7])
        rank, search = pipeline.stages["rank"], pipeline.stages["retrieve"].search
        price = [column.source for column in rank.item_plan.continuous].index("catalogue_unit_price")
        numbers = rank.inputs.item_numbers[:, price]
        assert search.servable[:2].tolist() == [True, False]
        assert numbers[0] != numbers[29]
        assert numbers[1] == numbers[29]


def test_the_gateway_shows_titles_and_availability_of_the_newer_catalogue(repository, upsert):
    now_s = int(time.time())
    upserted(upsert, 1, name="Upserted", title="Upserted", available=False)
    publish_times(repository, CatalogueTimes(np.array([1]), np.array([now_s + 60]), frozenset(["title", "name"])))
    published = Published.load(repository, 1)
    with closing(Reader(find_live_folder(repository))) as reader:
        items = LiveItems(reader, published)
        items.refresh()
    assert (items.titles, items.unavailable) == ({}, {1})  # the item file says nothing of availability


def test_an_export_publishes_the_times(tmp_path):
    dataset = load_shop(tmp_path / "data", iso(START_MS), "")
    make_content(dataset).save(tmp_path)
    times = present(Content.load(tmp_path).times)
    pd.testing.assert_series_equal(
        pd.Series(times.updated_s, times.item_ids), dataset.item_updates_s, check_index_type=False, check_names=False
    )
    assert times.columns == present(find_catalogue_times(dataset)).columns
