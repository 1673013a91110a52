"""The next export learns from live events: one log, each event once, with new and changed items and users."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np
import pandas as pd
import pytest

from export.continuous.continued import continue_log, read_events
from export.steps.live import make_event_kinds
from live.__main__ import open_writer
from live.archive import compact
from live.forget import forget_items
from serving.contract.errors import ConfigError, DependencyError
from serving.contract.ids import stable_id
from serving.live import store
from serving.live.events import HEADER, ITEM_CHANGED, OBSERVED, USER_CHANGED, EventBatch, EventKinds
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.store import set_aside
from serving.live.writer import Writer
from tests.present import present
from tests.unit.live.writing import list_stored_sequences
from training.dataset import Dataset, load_dataset

LOG = """
name = "shop"
[interactions]
path = "events.csv"
user_id = "user"
item_id = "item"
timestamp = "time"
"""
TOML = f"""{LOG}
label = "stars"
positive_at = 4
[items]
path = "items.csv"
item_id = "item"
title = "name"
categorical = ["kind"]
multi_categorical = {{ tags = "|" }}
continuous = ["price"]
category = "kind"
available = "stock"
[users]
path = "users.csv"
user_id = "user"
categorical = ["country"]
[context]
categorical = ["store"]
"""
EVENTS = "user,item,time,stars,store\n1,10,100,5,3\n2,11,200,2,\n"
ITEMS = "item,name,kind,tags,price,stock\n10,Lamp,light,a|b,2.5,1\n11,Vase,glass,,3.5,1\n"
USERS = "user,country\n1,FR\n2,DE\n"


def load(folder: Path, toml: str, **tables: str) -> Dataset:
    folder.mkdir()
    (folder / "dataset.toml").write_text(toml)
    for name, text in tables.items():
        (folder / f"{name}.csv").write_text(text)
    return load_dataset(folder)


@pytest.fixture
def dataset(tmp_path):
    return load(tmp_path / "data", TOML, events=EVENTS, items=ITEMS, users=USERS)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "repository.live"


@dataclass(frozen=True)
class Post:
    """Writes events and changes into a live store."""

    writer: Writer
    kinds: EventKinds

    def __call__(self, user: int, item: int, seconds: int, stars: float, **context: object) -> None:
        self._append(OBSERVED, user, item, seconds, stars, context)

    def item(self, item: int, **columns: object) -> None:
        self._append(ITEM_CHANGED, 0, item, 0, np.nan, columns)

    def user(self, user: int, **columns: object) -> None:
        self._append(USER_CHANGED, user, 0, 0, np.nan, columns)

    def _append(self, kind: int, user: int, item: int, seconds: int, stars: float, columns: dict[str, object]) -> None:
        headers = np.zeros(1, HEADER)
        headers["type"], headers["user_id"], headers["item_id"], headers["time_ms"] = kind, user, item, 1_000 * seconds
        headers["value"] = stars
        if kind == OBSERVED:
            self.kinds.decide(headers)
        self.writer.append(EventBatch(headers, [b""], [b""], [json.dumps(columns).encode() if columns else b""]))


@contextmanager
def posting(dataset: Dataset, folder: Path) -> Iterator[Post]:
    kinds = make_event_kinds(dataset.description)
    with closing(Writer(folder, Layout(), kinds.names, shop="shop")) as writer:
        yield Post(writer, kinds)


@pytest.fixture
def post(dataset, folder):
    with posting(dataset, folder) as post:
        yield post


def test_without_a_store_the_data_set_is_as_it_was(dataset, folder):
    assert continue_log(dataset, folder) is dataset


def test_events_continue_the_log(dataset, folder, post):
    post(2, 10, 300, 4.0, store=7)
    post(5, 11, 150, 1.0)
    log = continue_log(dataset, folder).interactions
    assert log.dtypes.to_dict() == dataset.interactions.dtypes.to_dict()
    assert log["timestamp"].tolist() == [100, 150, 200, 300]
    assert log["user_id"].tolist() == [1, 5, 2, 2]
    assert log["positive"].tolist() == [True, False, False, True]
    assert log["label"].tolist() == [5.0, 1.0, 2.0, 4.0]
    assert log["weight"].tolist() == [1.0, 1.0, 1.0, 1.0]
    assert log["store"].tolist()[3] == 7
    assert pd.isna(log["store"].tolist()[1])


def test_live_events_of_the_future_are_left_out(tmp_path, dataset, folder, post):
    """Their generation would take all later events for old ones."""
    future_s = int(time.time()) + 86_400
    post(2, 10, 300, 4.0)
    post(5, 11, future_s, 5.0)
    continued = continue_log(dataset, folder)
    assert continued.interactions["timestamp"].tolist() == [100, 200, 300]
    assert any(note.startswith("live events left out: 1, of the future") for note in continued.report.notes)
    ahead = load(tmp_path / "ahead", TOML, events=f"{EVENTS}1,11,{future_s},5,3\n", items=ITEMS, users=USERS)
    with pytest.raises(ConfigError, match="Correct the clock"):
        continue_log(ahead, folder)


def test_an_export_keeps_in_memory_only_what_belongs_in_the_log(dataset, folder, post):
    """The archive is kept for ever, and holds every view and every change of a price."""
    for price in range(5):
        post.item(10, price=price)
    post(2, 10, 300, 4.0, store=7)
    batches, _ = read_events(dataset, folder, None, np.empty(0, np.int64), [10])
    assert [(batch.headers["type"].tolist(), batch.columns) for batch in batches] == [([OBSERVED], [b'{"store": 7}'])]


def test_a_live_event_weighs_as_much_as_the_same_row_of_the_log(tmp_path, folder):
    """The weights of [events] compare kinds: that of the log's rows is their unit."""
    events = "[events.purchase]\npositive = true\nweight = 2\n[events.view]\nweight = 0.5\n"
    events += "[events.order]\npositive = true\nweight = 6\n"
    dataset = load(tmp_path / "sold", f'{LOG}weight = "quantity"\n{events}', events="user,item,time,quantity\n1,10,100,5\n")
    kinds = make_event_kinds(dataset.description)
    assert {kind.name: kind.weight for kind in kinds.kinds} == {"purchase": 1.0, "view": 0.25, "order": 3.0}
    with posting(dataset, folder) as post:
        post(1, 10, 200, 5.0)
    assert continue_log(dataset, folder).interactions["weight"].tolist() == [5.0, 5.0]


def test_a_context_column_may_get_another_type(dataset, folder, tmp_path):
    texts = load(tmp_path / "texts", TOML, events=EVENTS.replace(",3\n", ",A\n"), items=ITEMS, users=USERS)
    for before, value, now, expected in ((dataset, 7, texts, "7"), (texts, "B", dataset, pd.NA)):
        live = folder.with_name(f"{value}.live")
        with posting(before, live) as post:
            post(2, 10, 300, 4.0, store=value)
        stores = continue_log(now, live).interactions["store"]
        assert stores.dtype == now.interactions["store"].dtype
        assert stores.tolist()[-1] is expected or stores.tolist()[-1] == expected


def test_archived_events_continue_the_log_too(dataset, folder, post):
    post(2, 10, 300, 4.0, store=7)
    post(5, 12, 310, 5.0)
    post.item(12, title="Bowl")
    expected = continue_log(dataset, folder)
    with closing(open_writer(folder, folder.with_name("model_repository"))) as writer:
        assert compact(writer, writer.now_ms() + 1)[0] == 3
    assert list_stored_sequences(folder) == []
    post(1, 11, 320, 5.0)
    continued = continue_log(dataset, folder)
    pd.testing.assert_frame_equal(continued.interactions.iloc[:-1], expected.interactions)
    assert continued.interactions["timestamp"].tolist() == [100, 200, 300, 310, 320]
    pd.testing.assert_frame_equal(continued.items, expected.items)


def test_a_return_is_left_out_as_in_the_data_set(tmp_path, folder):
    toml = LOG + 'weight = "quantity"\n[items]\npath = "items.csv"\nitem_id = "item"\n'
    events = "user,item,time,quantity\n1,10,100,3\n1,10,200,-3\n"
    dataset = load(tmp_path / "data", toml, events=events, items="item\n10\n")
    with posting(dataset, folder) as post:
        for seconds, quantity in ((300, 2.0), (400, -2.0), (500, 0.0)):
            post(2, 10, seconds, quantity)
    log = continue_log(dataset, folder).interactions
    assert log["timestamp"].tolist() == [100, 300]
    assert log["weight"].tolist() == [3.0, 2.0]


@pytest.mark.parametrize(("tea", "postage"), [("10", "99"), ("TEA", "POST")])
def test_an_ignored_item_is_left_out_as_in_the_data_set(tmp_path, folder, tea, postage):
    events = f"user,item,time\n1,{tea},100\n1,{postage},100\n"
    dataset = load(tmp_path / "data", LOG + 'ignore_items = ["99", "POST"]\n', events=events)
    tea_id, postage_id = (int(text) if text.isdecimal() else stable_id(text) for text in (tea, postage))
    with posting(dataset, folder) as post:
        post(2, postage_id, 300, np.nan)
        post(2, tea_id, 400, np.nan)
        post.item(postage_id, title="Postage", item_id=postage)
    continued = continue_log(dataset, folder)
    assert continued.interactions["timestamp"].tolist() == [100, 400]
    assert continued.items["item_id"].tolist() == [tea_id]
    assert "live events left out: 1, of items that ignore_items lists" in continued.report.notes


def test_an_event_that_the_log_holds_already_counts_once(dataset, folder, post):
    post(1, 10, 100, 5.0)
    post(1, 10, 101, 5.0)
    assert continue_log(dataset, folder).interactions["timestamp"].tolist() == [100, 101, 200]


def test_new_items_and_users_get_rows_and_changed_ones_what_was_set(dataset, folder, post):
    post(5, 12, 300, 5.0)
    post.item(13, title="Bowl", kind="glass", category="glass", tags=["c"], price=9.5, available=False)
    post.item(10, price=None, kind="lamps", available=False)
    post.user(1, country="IT")
    post.user(6, country="ES")
    continued = continue_log(dataset, folder)
    items = continued.items.set_index("item_id")
    assert continued.items.dtypes.to_dict() == dataset.items.dtypes.to_dict()
    assert items.index.tolist() == [10, 11, 12, 13]
    assert items["title"].tolist() == ["Lamp", "Vase", "12", "Bowl"]
    assert items["kind"].tolist() == ["lamps", "glass", None, "glass"]
    assert items["category"].tolist() == ["light", "glass", None, "glass"]
    assert items["tags"].tolist() == [["a", "b"], [], [], ["c"]]
    assert items["available"].tolist() == [False, True, True, False]
    np.testing.assert_equal(items["price"].to_numpy(), np.array([np.nan, 3.5, np.nan, 9.5], np.float32))
    assert continued.users["user_id"].tolist() == [1, 2, 5, 6]
    assert continued.users["country"].tolist() == ["IT", "DE", None, "ES"]
    assert continued.report.notes[-1] == "1 live events continue the log"
    assert dataset.items["price"].tolist() == [2.5, 3.5]
    assert present(continued.learned_sales)[["item_id", "positive_count", "last_ms"]].tolist() == [(12, 1, 300_000)]
    assert dataset.learned_sales is None


def test_what_upsert_set_in_a_column_that_was_dropped_or_got_another_type_is_left_out(dataset, folder, post, tmp_path):
    post.item(10, title="Lantern", kind="wood", price=9.0, tags=["c"])
    post.user(1, country="IT")
    declared = {'categorical = ["kind"]': 'categorical = ["price"]', 'continuous = ["price"]': 'continuous = ["kind"]'}
    toml = TOML.replace('categorical = ["country"]\n', "").replace('category = "kind"\n', "")
    for old, new in declared.items():
        toml = toml.replace(old, new)
    numbers = ITEMS.replace("light", "1").replace("glass", "2")
    continued = continue_log(load(tmp_path / "changed", toml, events=EVENTS, items=numbers, users=USERS), folder)
    lamp = continued.items.set_index("item_id").loc[10]
    assert (lamp["title"], lamp["kind"], lamp["price"], lamp["tags"]) == ("Lantern", 1.0, "2.5", ["c"])
    assert "of another type: country, kind, price" in " ".join(continued.report.notes)


def test_an_export_says_how_many_rows_of_the_data_set_upsert_overrides(dataset, folder, post):
    post.item(10, price=9.5, available=True)
    post.item(11, price=3.5, tags=[])  # as in the data set
    post.item(13, title="Bowl", price=9.5)
    post.user(1, country="IT")
    today = time.strftime("%Y-%m-%d", time.gmtime())
    remedy = f"1, the oldest set on {today}. Those of upsert are used. To use the data set's, send them by upsert too"
    expected = [f"{name} with values from upsert that differ from the data set's: {remedy}" for name in ("items", "users")]
    expected[0] += ", or forget those of upsert: python -m live forget. With [items] updated_at, the later of both is used"
    assert continue_log(dataset, folder).report.notes[-3:-1] == expected
    post.item(10, price=2.5)
    assert continue_log(dataset, folder).report.notes[-2:-1] == expected[1:]


def test_what_upsert_set_before_the_data_set_was_written_can_be_forgotten(dataset, folder, post):
    post.item(10, price=9.5, available=False)
    post.item(11, price=9.5)
    with closing(open_writer(folder, folder.with_name("model_repository"))) as writer:
        forget_items(writer, [10])
    items = continue_log(dataset, folder).items.set_index("item_id")
    assert items["price"].tolist() == [2.5, 9.5]
    assert items["available"].tolist() == [True, True]


def test_the_store_of_another_shop_is_left_alone(dataset, folder):
    writer = Writer(folder, Layout(), ("rating",), shop="another")
    assert continue_log(dataset, folder).report == dataset.report
    Post(writer, make_event_kinds(dataset.description))(2, 10, 300, 4.0, store=7)
    writer.close()
    continued = continue_log(dataset, folder)
    assert continued.interactions is dataset.interactions
    note = continued.report.notes[-1]
    assert note.startswith(f"live events left out: {folder} holds those of the data set 'another', and this one is 'shop'.")


def test_a_reader_does_not_open_the_store_of_another_shop(folder):
    Writer(folder, Layout(), ("rating",), shop="another").close()
    reader = Reader(folder, "shop")
    with pytest.raises(DependencyError, match="holds the events of 'another'"), reader.snapshot():
        pass
    set_aside(folder, "shop")
    Writer(folder, Layout(), ("rating",), shop="shop").close()
    with reader.snapshot() as snapshot:
        assert snapshot.read_progress().last_sequence == 0
    reader.close()


def test_the_store_of_another_shop_is_set_aside_and_kept(folder):
    Writer(folder, Layout(), ("rating",), shop="another").close()
    assert set_aside(folder, "another") is None
    assert set_aside(folder, "shop") == folder.with_name("repository.live.another")
    assert not folder.exists()
    assert set_aside(folder, "shop") is None
    Writer(folder, Layout(), ("rating",), shop="another").close()
    assert set_aside(folder, "shop") == folder.with_name("repository.live.another.2")


def test_a_shop_that_comes_back_has_its_own_store_again(folder):
    """A server may have been moved to the generation of another shop by mistake, and back."""
    Writer(folder, Layout(), ("rating",), shop="another").close()
    (folder / "of_another").touch()
    set_aside(folder, "shop")
    Writer(folder, Layout(), ("rating",), shop="shop").close()
    assert set_aside(folder, "another") == folder.with_name("repository.live.shop")
    assert (folder / "of_another").exists()
    assert not folder.with_name("repository.live.another").exists()
    assert set_aside(folder, "another") is None
    assert set_aside(folder, "shop") == folder.with_name("repository.live.another")
    assert not (folder / "of_another").exists()
    assert folder.exists()


def test_of_two_processes_that_set_a_store_aside_the_slower_one_leaves_the_new_store_alone(folder, monkeypatch):
    Writer(folder, Layout(), ("rating",), shop="another").close()

    def wait_for_the_faster_one(*_: object) -> None:
        monkeypatch.undo()
        folder.rename(folder.with_name("repository.live.another"))
        Writer(folder, Layout(), ("rating",), shop="shop").close()

    monkeypatch.setattr(fcntl, "flock", wait_for_the_faster_one)
    assert set_aside(folder, "shop") is None
    assert folder.exists()


def test_a_store_that_another_process_is_still_making_is_not_set_aside(folder):
    folder.mkdir(mode=0o700)
    lmdb.open(str(folder), max_dbs=len(store.DATABASES), mode=0o600).close()  # databases come later
    assert set_aside(folder, "shop") is None
    Writer(folder, Layout(), ("rating",), shop="shop").close()
