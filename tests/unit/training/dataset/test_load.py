"""Good input: what the three frames hold."""

from __future__ import annotations

import gzip

import numpy as np
import pandas as pd
import pytest

from serving.contract.errors import DataError
from serving.contract.ids import stable_id
from serving.contract.tensors import ContextColumn
from tests.present import present
from tests.unit.training.dataset.conftest import EVENTS_CSV, ITEMS, TOML, USERS
from training.dataset import BUNDLED, load_dataset
from training.dataset.__main__ import collect_facts
from training.dataset.description import read_description
from training.dataset.load import PROJECT, find_file


def test_user_item_and_time_are_enough(shop):
    dataset = load_dataset(shop())
    log = dataset.interactions
    assert log.columns.tolist() == ["user_id", "item_id", "timestamp", "positive", "weight", "label"]
    assert [str(kind) for kind in log.dtypes] == ["int64", "int64", "int64", "bool", "float32", "float32"]
    assert log["timestamp"].tolist() == [100, 200, 300]
    assert log["user_id"].tolist() == [7, 8, 7]
    assert log["item_id"].tolist() == [11, 10, 10]
    assert log["positive"].all()
    assert log["weight"].tolist() == [1, 1, 1]
    assert log["label"].isna().all()
    assert dataset.items["item_id"].tolist() == [10, 11]
    assert dataset.items["title"].tolist() == ["10", "11"]
    assert dataset.items["available"].tolist() == [True, True]
    assert dataset.users["user_id"].tolist() == [7, 8]
    assert dataset.user_names is None
    assert dataset.item_names is None
    assert dataset.context_columns == ()


def test_times_are_read_in_the_format_that_each_file_states(shop):
    events = "customer,sku,time\n7,10,16.03.2024 04:29\n8,12,01.03.2024 23:59\n"
    items = "sku,description,brand,tags,price,in_stock,changed\n10,Tea,Acme,hot,2.5,1,03/16/2024\n12,Mug,,,,1,\n"
    toml = TOML + 'time_format = "%d.%m.%Y %H:%M"\n' + ITEMS + 'updated_at = "changed"\ntime_format = "%m/%d/%Y"\n'
    dataset = load_dataset(shop(toml, **{"events.csv": events, "items.csv": items}))
    assert dataset.interactions["timestamp"].tolist() == [1709337540, 1710563340]
    assert dataset.item_updates_s is not None
    assert dataset.item_updates_s.to_dict() == {10: 1710547200}
    assert not [note for note in dataset.report.notes if "time" in note]


def test_item_and_user_files_join_the_log(shop):
    dataset = load_dataset(shop(TOML + ITEMS + USERS))
    items, users = dataset.items, dataset.users
    assert items["item_id"].tolist() == [10, 11, 12]  # 11 only in the log, 12 only in the file
    assert items["title"].tolist() == ["Tea", "11", "Mug"]
    assert items["available"].tolist() == [True, True, False]
    assert items["brand"].tolist() == ["Acme", None, None]
    assert items["provider"].tolist() == ["Acme", None, None]
    assert items["tags"].tolist() == [["hot", "drink"], [], []]
    assert items["category"].tolist() == ["hot", None, None]
    np.testing.assert_array_equal(items["price"], np.array([2.5, np.nan, np.nan], np.float32))
    assert users["user_id"].tolist() == [7, 8, 9]
    assert users["country"].tolist() == ["Italy", None, None]
    np.testing.assert_array_equal(users["age"], np.array([40, np.nan, np.nan], np.float32))
    note = "1 of 2 item_ids of the log are not in items.csv. They may be recommended: add rows, with available = 0 to hide them"
    assert note in dataset.report.notes


def test_a_feature_may_be_named_as_the_role_it_fills(shop):
    items = '[items]\npath = "items.csv"\nitem_id = "sku"\ncategorical = ["category", "provider"]\ncategory = "category"\n'
    table = load_dataset(shop(TOML + items, **{"items.csv": "sku,category,provider\n10,tea,Acme\n"})).items
    assert table["category"].tolist() == ["tea", None]
    assert table["provider"].tolist() == ["Acme", None]
    assert table.columns.tolist() == ["item_id", "title", "category", "provider", "available"]


PRICES_CSV = "sku,price,unit_price,pack_price\n10,cheap,2.5,30\n12,dear,,90\n"


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ('continuous = ["unit_price"]\nprice = "unit_price"\n', [2.5, np.nan, np.nan]),
        ('continuous = ["unit_price"]\nprice = "pack_price"\n', [30, np.nan, 90]),  # need not be a feature
        ('continuous = ["unit_price"]\n', None),
        ('categorical = ["price"]\n', None),  # bands are no numbers
    ],
)
def test_a_price_has_the_column_that_is_named(shop, items, expected):
    toml = f'{TOML}[items]\npath = "items.csv"\nitem_id = "sku"\n{items}'
    prices = load_dataset(shop(toml, **{"items.csv": PRICES_CSV})).prices
    assert (prices is None) == (expected is None)
    if expected is not None:
        np.testing.assert_array_equal(present(prices), np.array(expected, np.float32))


def test_a_continuous_column_price_is_the_price(shop):
    prices = present(load_dataset(shop(TOML + ITEMS)).prices)
    np.testing.assert_array_equal(prices, np.array([2.5, np.nan, np.nan], np.float32))
    np.testing.assert_array_equal(present(load_dataset(shop(f'{TOML}{ITEMS}price = "price"\n')).prices), prices)
    assert load_dataset(shop(TOML)).prices is None


def test_text_ids_are_mapped_in_log_and_item_file_alike(shop):
    events = "customer,sku,time\nann,10,300\nbob,A-1,100\n"
    dataset = load_dataset(shop(TOML + ITEMS, **{"events.csv": events}))
    assert dataset.interactions["item_id"].tolist() == [stable_id("A-1"), stable_id("10")]
    titles = dict(zip(dataset.items["item_id"], dataset.items["title"], strict=True))
    assert titles == {stable_id("10"): "Tea", stable_id("12"): "Mug", stable_id("A-1"): "A-1"}
    assert dict(present(dataset.user_names).itertuples(index=False)) == {stable_id("ann"): "ann", stable_id("bob"): "bob"}
    item_names = present(dataset.item_names)
    assert set(item_names["name"]) == {"10", "12", "A-1"}
    assert item_names["id"].is_monotonic_increasing


def test_labels_make_positives_and_the_others_stay(shop):
    toml = TOML + 'label = "stars"\npositive_at = 4\n'
    dataset = load_dataset(shop(toml, **{"events.csv": "customer,sku,time,stars\n1,1,1,4\n1,2,2,3.5\n1,3,3,\n"}))
    assert dataset.interactions["positive"].tolist() == [True, False]
    assert dataset.interactions["label"].tolist() == [4.0, 3.5]
    assert dataset.report.dropped == {"no label (stars is empty)": 1}


def test_labels_without_positive_at_are_positive_above_zero(shop):
    toml = TOML + 'label = "clicked"\n'
    dataset = load_dataset(shop(toml, **{"events.csv": "customer,sku,time,clicked\n1,1,1,0\n1,2,2,1\n"}))
    assert dataset.interactions["positive"].tolist() == [False, True]


def test_rows_that_cannot_be_used_are_dropped_and_counted_once(shop):
    toml = TOML + 'weight = "quantity"\nignore_items = ["POST", 5]\n' + ITEMS
    events = "customer,sku,time,quantity\n,1,1,1\n1,,1,1\n1,1,,1\n1,POST,1,-1\n1,5,1,1\n1,1,1,-2\n1,1,1,0\n1,1,9,\n1,2,8,3\n"
    items = "sku,description,brand,tags,price,in_stock\nPOST,Postage,,,,\n1,One,,,,\n"
    dataset = load_dataset(shop(toml, **{"events.csv": events, "items.csv": items}))
    assert dataset.report.rows_read == 9
    assert dataset.report.dropped == {
        "no user (customer is empty)": 1,
        "no item (sku is empty)": 1,
        "no time (time is empty)": 1,
        "item is listed in ignore_items": 2,
        "weight (quantity) is not above 0": 2,
    }
    assert dataset.interactions["weight"].tolist() == [3, 1]  # a missing weight is 1
    assert sorted(dataset.items["title"]) == ["2", "One"]  # ignored items are in no table
    assert "9 rows read, 2 kept" in str(dataset.report)
    assert "  2 rows dropped: item is listed in ignore_items" in str(dataset.report)


def test_ignored_items_are_found_however_a_data_frame_wrote_their_numbers(shop):
    toml = TOML + "ignore_items = [5, 0]\n"
    dataset = load_dataset(shop(toml, **{"events.csv": "customer,sku,time\n1,5.0,1\n1,0.0,2\n1,,3\n1,7.0,4\n"}))
    assert dataset.report.dropped == {"no item (sku is empty)": 1, "item is listed in ignore_items": 2}
    assert dataset.items["item_id"].tolist() == [7]


def test_entries_of_ignore_items_that_no_row_has_are_named(shop):
    toml = TOML + 'ignore_items = ["POST", "post", 5]\n'
    dataset = load_dataset(shop(toml, **{"events.csv": "customer,sku,time\n1,POST,1\n1,A,2\n"}))
    (note,) = [note for note in dataset.report.notes if note.startswith("ignore_items")]
    assert note.startswith("ignore_items: no row of the log or the item file has 'post', 5. Correct the ids")


def test_a_time_of_nought_is_noticed(shop):
    rows = "customer,sku,time\n1,1,0\n1,2,1600000000\n2,1,1600000001\n"
    (note,) = load_dataset(shop(TOML, **{"events.csv": rows})).report.notes
    assert note.startswith("the log begins on 1970-01-01: 1 events are before 1990")


def test_context_columns_tell_their_kind(shop):
    toml = TOML + '[context]\ncategorical = ["store", "device"]\ncontinuous = ["km"]\n'
    events = "customer,sku,time,store,device,km\n1,1,1,4,phone,0.5\n1,1,2,,,\n"
    dataset = load_dataset(shop(toml, **{"events.csv": events}))
    assert dataset.context_columns == (
        ContextColumn("store", "integer"),
        ContextColumn("device", "string"),
        ContextColumn("km", "continuous"),
    )
    log = dataset.interactions
    assert log["store"].dtype == "Int64"
    assert log["store"].tolist() == [4, pd.NA]
    assert log["device"].tolist() == ["phone", None]
    np.testing.assert_array_equal(log["km"], np.array([0.5, np.nan], np.float32))


@pytest.mark.parametrize("kind", ["csv.gz", "CSV.GZ", "tsv", "tsv.gz", "parquet"])
def test_every_kind_of_file_reads_alike(shop, tmp_path, kind):
    expected = load_dataset(shop()).interactions
    text = EVENTS_CSV.replace(",", "\t") if "tsv" in kind else EVENTS_CSV
    path = tmp_path / f"events.{kind}"
    if kind == "parquet":
        pd.read_csv(tmp_path / "events.csv").to_parquet(path)
    else:
        path.write_bytes(gzip.compress(text.encode()) if kind.lower().endswith("gz") else text.encode())
    pd.testing.assert_frame_equal(load_dataset(shop(TOML.replace("events.csv", path.name))).interactions, expected)


def test_parquet_keeps_times_integers_with_gaps_and_flags(shop, tmp_path):
    frame = pd.DataFrame({"customer": [1.0, np.nan, 3.0], "sku": ["x", "y", "z"], "vip": [True, False, True]})
    frame["time"] = pd.to_datetime(["2020-01-01 00:00:01", "2020-01-01", "1970-01-01 00:00:05"])
    frame.to_parquet(tmp_path / "events.parquet")
    toml = TOML.replace("events.csv", "events.parquet") + '[context]\ncategorical = ["vip"]\n'
    log = load_dataset(shop(toml)).interactions
    assert log["user_id"].tolist() == [3, 1]
    assert log["timestamp"].tolist() == [5, 1577836801]
    assert log["vip"].tolist() == [1, 1]


def test_parquet_keeps_every_digit_of_large_ids_with_gaps(shop, tmp_path):
    customers = pd.array([2**60 + 1, 2**60 + 3, None], dtype="Int64")
    pd.DataFrame({"customer": customers, "sku": [1, 2, 3], "time": [1, 2, 3]}).to_parquet(tmp_path / "events.parquet")
    log = load_dataset(shop(TOML.replace("events.csv", "events.parquet"))).interactions
    assert log["user_id"].tolist() == [2**60 + 1, 2**60 + 3]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_whole_numbers_of_parquet_floats_are_integers(shop, tmp_path, dtype):
    columns = {"customer": [1], "sku": [1], "time": [1], "store": np.array([7], dtype)}
    pd.DataFrame(columns).to_parquet(tmp_path / "events.parquet")
    toml = (
        TOML.replace("events.csv", "events.parquet")
        + '[items]\npath = "events.parquet"\nitem_id = "sku"\ncategorical = ["store"]\n'
    )
    assert load_dataset(shop(toml)).items["store"].tolist() == ["7"]


def test_spaces_blank_lines_byte_order_mark_and_quotes_are_no_matter(shop):
    events = '\ufeffcustomer,sku,time\r\n 7 ,"a,\nb",300\r\n\r\n   ,x,1\r\nNULL,x,1\r\n'
    dataset = load_dataset(shop(**{"events.csv": events}))
    assert dataset.interactions["user_id"].tolist() == [7]
    assert present(dataset.item_names)["name"].tolist() == ["a,\nb"]
    assert dataset.report.dropped == {"no user (customer is empty)": 2}


def test_a_very_long_title_is_kept(shop):
    items = TOML + '[items]\npath = "items.csv"\nitem_id = "sku"\ntitle = "title"\n'
    title = "tea " * 1_000_000 + "end"
    assert load_dataset(shop(items, **{"items.csv": f"sku,title\n10,{title}\n"})).items["title"].iloc[0] == title


def test_rows_of_a_side_file_without_an_id_are_left_out_and_told(shop):
    dataset = load_dataset(shop(TOML + USERS, **{"users.csv": "customer,country,age\n,Italy,4\n7,Spain,5\n,,6\n"}))
    assert dataset.users["user_id"].tolist() == [7, 8]
    assert "users.csv: 2 rows without customer left out" in dataset.report.notes


def test_times_in_milliseconds_are_told_in_the_report(shop):
    dataset = load_dataset(shop(**{"events.csv": "customer,sku,time\n1,1,1291191960123\n"}))
    assert dataset.interactions["timestamp"].tolist() == [1291191960]
    assert dataset.report.notes == ["column 'time' was read as unix milliseconds"]


def test_a_few_ids_that_make_all_of_them_text_are_told_in_the_report(shop):
    rows = [f"1,{item},2020-01-01" for item in [*range(20), "20a"]]
    notes = load_dataset(shop(**{"events.csv": "\n".join(["customer,sku,time", *rows, ""])})).report.notes
    assert len(notes) == 1
    assert "sku: all ids are text, because 1 of 21 are not integers, such as '20a'." in notes[0]


def test_many_repeated_rows_are_told_in_the_report(shop):
    dataset = load_dataset(shop(**{"events.csv": "customer,sku,time\n1,1,1\n1,1,1\n1,1,2\n"}))
    assert len(dataset.interactions) == 3
    assert dataset.report.notes[0].startswith("1 rows have user, item and time of an earlier row")


@pytest.mark.parametrize(("views", "is_told"), [(3, True), (2, False)])
def test_a_log_whose_purchases_follow_views_is_told_in_the_report(shop, views, is_told):
    rows = [f"{user},1,2020-01-01,1" for user in range(views)] + [f"{user},1,2020-01-02,5" for user in range(4)]
    rows += ["0,1,2020-01-03,5"]  # bought again
    toml = TOML + 'label = "kind"\npositive_at = 5\n'
    notes = load_dataset(shop(toml, **{"events.csv": "\n".join(["customer,sku,time,kind", *rows, ""])})).report.notes
    assert [note.startswith(f"{views} of 4 first positives of a user and an item come after another") for note in notes] == [
        True
    ] * is_told


@pytest.mark.parametrize(("weeks", "is_told"), [(3, True), (2, False)])
def test_a_log_of_repeated_purchases_is_told_in_the_report(shop, weeks, is_told):
    rows = [f"{user},1,2020-01-0{week + 1}" for week in range(weeks) for user in range(4)]
    notes = load_dataset(shop(**{"events.csv": "\n".join(["customer,sku,time", *rows, ""])})).report.notes
    assert [note.startswith("8 of 12 positives repeat an earlier one of their user and item") for note in notes] == [
        True
    ] * is_told


def test_a_log_that_ends_in_the_future_is_told_in_the_report(shop):
    dataset = load_dataset(shop(**{"events.csv": "customer,sku,time\n1,1,1600000000\n1,1,32472144000\n"}))
    assert dataset.report.notes[0].startswith("the log ends on 2999-01-01 00:00 UTC, in the future")
    assert collect_facts(dataset)["events"].endswith("2999-01-01 00:00 UTC")


@pytest.mark.parametrize(("offset", "is_told"), [("", True), ("+01:00", False)])
def test_local_times_without_an_offset_are_told_while_they_are_ahead(shop, monkeypatch, offset, is_told):
    monkeypatch.setattr("time.time", lambda: 1_795_525_500.0)  # 2026-11-24 13:05 UTC, 14:05 in Berlin
    notes = load_dataset(shop(**{"events.csv": f"customer,sku,time\n1,1,2026-11-24 14:05:00{offset}\n"})).report.notes
    assert [note.startswith("the log ends on 2026-11-24 14:05 UTC, in the future") for note in notes] == [True] * is_told


def test_files_are_looked_for_in_the_named_folder_too(shop, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "far").mkdir(parents=True)
    (elsewhere / "far" / "events.csv").write_text(EVENTS_CSV)
    monkeypatch.setenv("RECOMMENDER_DATA", str(elsewhere))
    assert find_file(shop(), "far/events.csv") == elsewhere / "far" / "events.csv"
    assert find_file(shop(), "events.csv") == tmp_path / "events.csv"


def test_online_retail_is_bundled():
    dataset = load_dataset("online-retail")
    log, items = dataset.interactions, dataset.items
    assert len(log) == 396_374
    assert (log["user_id"].nunique(), log["item_id"].nunique()) == (4_335, 3_660)
    assert (log["weight"] > 0).all()
    assert log["item_id"].isin(items["item_id"]).all()
    lamp = items.loc[items["item_id"] == stable_id("85123A")].iloc[0]
    assert lamp["title"] == "WHITE HANGING HEART T-LIGHT HOLDER"
    assert (items["category"] == "OTHER").mean() < 0.1
    assert "POST" not in set(present(dataset.item_names)["name"])
    assert items["price"].dropna().between(0, 1_000).all()
    assert dataset.users["country"].notna().all()


# name -> events kept, items, users with a row, context columns
ELSEWHERE = {
    "movielens": (100_836, 9_742, 610, 0),
    "complete-journey": (74_584, 92_332, 2_373, 1),
    "amazon-grocery": (121_892, 8_713, 14_681, 0),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_descriptions_of_data_that_is_not_bundled(name):
    assert name in BUNDLED
    folder = PROJECT / "data" / name
    description = read_description(folder)
    try:
        find_file(folder, description.interactions.path)
    except DataError as absent:
        pytest.skip(str(absent))
    dataset = load_dataset(name)
    events, items, users, context = ELSEWHERE[name]
    assert (len(dataset.interactions), len(dataset.items), len(dataset.users)) == (events, items, users)
    assert len(dataset.context_columns) == context
    assert dataset.item_names is None
    assert dataset.items["category"].notna().mean() > 0.95
