"""The ranker's tables are served exactly, with the settings that the export writes beside them."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from export.settings import TableSettings
from export.tables import PS_FILE, check_tables, plan_tables, write_tables
from hps_config.reader import check_ps_json, read_ps_json
from repository.checks.finding import Finding, count_errors
from serving.contract.errors import ConfigError, DataError
from serving.tables.config import read_config
from serving.tables.leveled import CONFIG_FILE
from serving.tables.opening import open_tables
from serving.tables.store.tables import EmbeddingTables
from serving.tables.updates.applier import Applier
from tests.unit.tables.conftest import assert_answer
from tests.unit.tables.updating import Log

SHAPES = {"user_0": (4_000, 8), "item_0": (500, 8), "item_1": (12, 8)}
SOME = "100 KiB"  # of memory: too little for all rows


@pytest.fixture
def folder(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "tables").mkdir()
    for name, shape in SHAPES.items():
        np.save(tmp_path / "tables" / f"{name}.npy", rng.standard_normal(shape, dtype=np.float32))
    return tmp_path / "tables"


def written(folder: Path, **settings):
    write_tables(folder, TableSettings(**settings), instances=2, samples=1024)
    return read_config(folder / CONFIG_FILE)


def keys(shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(1)
    return np.stack([rng.integers(0, rows, shape) for rows, _ in SHAPES.values()], axis=-1)


@pytest.mark.parametrize(
    "settings",
    [{}, {"l2": SOME}, {"l2": 0}, {"l2": SOME, "hit_rate_threshold": 0.0}, {"l1": "270 KiB", "l2": SOME}],
    ids=["default", "part in memory", "no memory", "late rows", "little of each"],
)
def test_what_is_written_serves_the_published_rows_bit_for_bit(folder, tmp_path, settings):
    written(folder, state=str(tmp_path / "state"), **settings)
    published = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    tiers, plain = open_tables(folder, "rank", tuple(SHAPES)), EmbeddingTables.load(folder)
    wanted = ((tuple(SHAPES)[:1], keys((3,))[..., :1]), (tuple(SHAPES)[1:], keys((3, 50))[..., 1:]))
    for _ in range(3 if "hit_rate_threshold" in settings else 1):  # rows that come late are there the next time
        answers = tiers.gather(*wanted)
        tiers.settle()
    for got, expected in zip(answers.values, plain.gather(*wanted).values, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert not answers.degraded
    tiers.close()
    # tritonserver loads a version again when anything in its folder changes
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == published


def test_tables_that_fit_memory_need_no_database(folder):
    config = written(folder)
    assert config.rocksdb is None
    assert all(table.complete and table.l1_rows == 0 for table in config.tables)
    assert read_ps_json(folder / PS_FILE).persistent_db.type == "disabled"


def test_tables_that_do_not_fit_have_one_outside_the_repository(folder):
    config = written(folder, l2=SOME)
    assert config.rocksdb.path.startswith(f"{tempfile.gettempdir()}/recommender-tables/{config.model}-")
    assert not all(table.complete for table in config.tables)
    assert all(table.l1_rows for table in config.tables if not table.complete)
    assert written(folder, l2=SOME, state="/var/lib/shop").rocksdb.path.startswith(f"/var/lib/shop/{config.model}-")


def test_updates_must_not_be_lost(folder):
    config = written(folder, brokers="a:1,b:2")
    assert config.updates.brokers == "a:1,b:2"
    assert config.rocksdb is not None
    assert all(table.complete for table in config.tables)


def test_redis_takes_the_place_of_memory(folder):
    config = written(folder, redis="h:7000")
    assert config.redis.address == "h:7000"
    assert [table.l2_rows for table in config.tables] == [0, 0, 0]


@pytest.mark.parametrize("settings", [{}, {"l2": SOME}, {"brokers": "a:1"}, {"redis": "h:7000"}, {"row_format": "int8"}])
def test_nvidias_parsers_take_the_ps_json(folder, settings):
    written(folder, **settings)
    assert [finding for finding in check_ps_json(folder / PS_FILE) if finding.level == "error"] == []


def test_row_formats_by_table(folder):
    config = written(folder, row_format="int8", row_formats={"item_1": "fp16"})
    assert {table.name: table.row_format for table in config.tables} == {"user_0": "int8", "item_0": "int8", "item_1": "fp16"}
    with pytest.raises(ConfigError, match=r"names item_9\. The ranker's tables are"):
        plan_tables(TableSettings(row_formats={"item_9": "int8"}), SHAPES, 1, 1)


def test_other_rows_get_another_name(folder):
    first = written(folder)
    assert written(folder).model == first.model
    np.save(folder / "item_1.npy", np.ones((12, 8), np.float32))
    again = written(folder)
    assert again.model != first.model
    assert again.arena != first.arena


def test_budgets_that_cannot_hold_the_tables_are_refused_with_what_would_fit():
    with pytest.raises(ConfigError, match=r"raise l2 to \d+ bytes; or give l3 \d+ bytes of disk"):
        plan_tables(TableSettings.model_validate({"l2": SOME, "l3": 0}), SHAPES, 1, 1)


def test_values_that_a_row_format_cannot_hold_are_refused(folder):
    np.save(folder / "item_1.npy", np.full((12, 8), 1e6, np.float32))
    with pytest.raises(DataError, match="Keep this table in fp32"):
        written(folder, row_format="int8")


def test_rows_that_no_level_gives_are_the_mean_row(folder):
    mean = np.load(folder / "item_0.npy").mean(axis=0)
    default = {table.name: table.default for table in written(folder).tables}["item_0"]
    np.testing.assert_allclose(default, mean, atol=1e-6)


def test_sound_settings_have_no_faults(folder, tmp_path):
    for settings in (
        {},
        {"l2": SOME},
        {"redis": "h:7000"},
        {"brokers": "a:1", "state": "/var/lib/shop"},
        {"brokers": "a:1", "l2": SOME},
    ):
        written(folder, **settings)
        assert count_errors(check_tables(folder)) == 0
    for settings, kept in (({"brokers": "a:1"}, "updates"), ({"l2": SOME}, "rows")):
        written(folder, **settings)
        assert check_tables(folder)[-1].fact.startswith(f"keeps {kept} in {tempfile.gettempdir()}/recommender-tables/")


def test_settings_that_nvidia_would_not_read_are_faults(folder):
    written(folder)
    document = json.loads((folder / PS_FILE).read_text())
    document["models"][0].pop("gpucacheper")
    (folder / PS_FILE).write_text(json.dumps(document))
    assert [finding.where for finding in check_tables(folder) if finding.level == "error"] == ["ps.json models[0].gpucacheper"]


def test_settings_that_disagree_are_a_fault(folder):
    config = written(folder, l2=SOME, state="/var/lib/shop")
    replace(config, hit_rate_threshold=0.5, source=".").write(folder / CONFIG_FILE)
    remedy = "Expected the same tables and levels. Export the repository again."
    expected = Finding("error", CONFIG_FILE, "differs from ps.json", remedy)
    assert check_tables(folder) == [expected]


def test_other_settings_of_the_same_tables_share_neither_memory_nor_database(folder):
    first, again = written(folder, brokers="a:1"), written(folder, brokers="a:1", l1=1 << 25, hit_rate_threshold=0.5)
    assert (again.arena, again.rocksdb.path) == (first.arena, first.rocksdb.path)
    for settings in ({}, {"brokers": "b:1"}, {"brokers": "a:1", "row_format": "int8"}, {"brokers": "a:1", "l2": SOME}):
        other = written(folder, **settings)
        assert other.model == first.model
        assert other.arena != first.arena
        assert other.rocksdb is None or other.rocksdb.path != first.rocksdb.path


def test_updated_rows_are_served_beside_a_repository_of_the_same_tables_that_is_not_updated(folder, tmp_path):
    """The other one's server fills its memory first. A server that shared these rows would serve them as they were exported."""
    other, state = Path(shutil.copytree(folder, tmp_path / "other")), str(tmp_path / "state")
    config = written(folder, brokers="a:1", state=state)
    items, updated = np.arange(12), np.full((12, 8), 7, np.float32)
    with closing(Applier(config)) as applier:
        applier.apply("item_1", Log().batch(items, updated))
    written(other)
    with closing(open_tables(other, "rank")) as beside, closing(open_tables(folder, "rank")) as served:
        assert_answer(served.lookup("item_1", items), updated, degraded=False)
        assert_answer(beside.lookup("item_1", items), np.load(other / "item_1.npy"), degraded=False)


def test_updates_reach_the_servers_of_the_same_tables_in_another_format(folder, tmp_path):
    """Each has an updater of its own, because an updater writes rows in one format."""
    other, state = Path(shutil.copytree(folder, tmp_path / "other")), str(tmp_path / "state")
    settings = written(folder, brokers="a:1", state=state), written(other, brokers="a:1", state=state, row_format="fp16")
    items, updated = np.arange(12), np.full((12, 8), 7, np.float32)
    with ExitStack() as opened:
        served = [opened.enter_context(closing(open_tables(each, "rank"))) for each in (folder, other)]
        for config in settings:
            applier = opened.enter_context(closing(Applier(config)))
            applier.apply("item_1", Log().batch(items, updated))
            assert not applier.behind
            assert applier.l3_open
        for tables in served:
            assert_answer(tables.lookup("item_1", items), updated, degraded=False)
