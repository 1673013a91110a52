"""Each fault of a data set raises one DataError that names file, column, row and remedy."""

from __future__ import annotations

import gzip

import pytest

from serving.contract.errors import DataError
from tests.unit.training.dataset.conftest import EVENTS_CSV, ITEMS, TOML, USERS, message
from training.dataset import load_dataset, split_log

LABELLED = TOML + 'label = "stars"\npositive_at = 4\n'


def aggregate(value: str) -> str:
    return f'[[aggregations]]\nname = "a"\nentity = "user"\nvalue = "{value}"\nfunction = "sum"\nwindow = "7d"\n'


# fault -> (dataset.toml, parts of the message)
BAD_DESCRIPTIONS = {
    "not TOML": ("name = \n", ["dataset.toml is not valid TOML", "line 1"]),
    "no name": (TOML.replace('name = "corner-shop"', ""), ["lacks the required key 'name'"]),
    "name with a slash": (
        TOML.replace('"corner-shop"', '"../shop"'),
        ["name", "'../shop' becomes the name of a folder", "slashes"],
    ),
    "no interactions": ('name = "x"\n', ["lacks the required key 'interactions'"]),
    "no required key": (TOML.replace('timestamp = "time"', ""), ["[interactions] lacks the required key 'timestamp'"]),
    "one column for two ids": (TOML.replace('item_id = "sku"', 'item_id = "customer"'), ["three columns"]),
    "unknown key": (
        TOML + 'labels = "stars"\n',
        ["[interactions] has the unknown key 'labels'", "Allowed: path, user_id", "Rename"],
    ),
    "unknown section": (TOML + "[item]\n", ["unknown key 'item'", "Allowed: name, interactions, items, users, context"]),
    "key of the wrong type": (TOML.replace('"time"', "3"), ["[interactions] timestamp", "valid string"]),
    "empty column name": (TOML.replace('"time"', '""'), ["[interactions] timestamp", "at least 1 character"]),
    "positive_at that is no number": (
        TOML + 'label = "stars"\npositive_at = "4"\n',
        ["[interactions] positive_at: Input should be a valid number, got '4'. Correct it"],
    ),
    "positive_at without label": (TOML + "positive_at = 4\n", ["[interactions]", "needs label"]),
    "time_format without the day": (
        TOML + 'time_format = "%H:%M"\n',
        ["[interactions] time_format", "not tell year, month and"],
    ),
    "time_format of another kind": (TOML + 'time_format = "DD.MM.YYYY"\n', ["[interactions] time_format", "strptime"]),
    "time_format with an unknown directive": (
        TOML + 'time_format = "%d.%m.%Y %k"\n',
        ["time_format", "is no format of strptime"],
    ),
    "time_format of no time": (TOML + ITEMS + 'time_format = "%d.%m.%Y"\n', ["[items]", "needs updated_at"]),
    "feature twice": (TOML + ITEMS.replace('["price"]', '["price", "brand"]'), ["[items]", "'brand' is declared twice"]),
    "user feature twice": (TOML + USERS.replace('["age"]', '["country"]'), ["[users]", "'country' is declared twice"]),
    "context twice": (TOML + '[context]\ncategorical = ["a", "a"]\n', ["[context]", "'a' is declared twice"]),
    "feature named as a role": (
        TOML + ITEMS.replace('["brand"]', '["title"]'),
        ["[items]", "'title' has the name of a role", "rename"],
    ),
    "feature named as a role another column fills": (
        TOML + ITEMS.replace('["brand"]', '["provider"]'),
        ["[items]", "'provider' has the name of a role"],
    ),
    "list feature named as a role": (
        TOML + ITEMS.replace("{ tags", "{ category"),
        ["[items]", "'category' has the name of a role"],
    ),
    "feature price that is not the price": (
        TOML + ITEMS + 'price = "brand"\n',
        ["[items]", 'price = "brand" is the column of price rules', "rename"],
    ),
    "feature named item_id": (TOML + ITEMS.replace('["brand"]', '["item_id"]'), ["'item_id' has the name of a role"]),
    "feature named user_id": (TOML + USERS.replace('["country"]', '["user_id"]'), ["[users]", "user_id is always a feature"]),
    "context named as a tensor": (TOML + '[context]\ncategorical = ["history"]\n', ["[context]", "'history' has a name that"]),
    "context named category": (
        TOML + '[context]\ncategorical = ["category"]\n',
        ["'category' has a name that the served models use themselves", "rename it in the file"],
    ),
    "context named as a record": (
        TOML + '[context]\ncategorical = ["candidates"]\n',
        ["[context]", "'candidates' has a name that"],
    ),
    "context named as a log column": (
        TOML + '[context]\ncategorical = ["weight"]\n',
        ["[context]", "'weight' has a name that"],
    ),
    "item as context": (
        TOML + '[context]\ncategorical = ["sku"]\n',
        ["[context] 'sku' is the item_id of [interactions]", "take it out"],
    ),
    "label as context": (
        LABELLED + '[context]\ncontinuous = ["stars"]\n',
        ["[context] 'stars' is the label of [interactions]"],
    ),
    "no positive event": (TOML + "[events.view]\n", ["[events] has no positive event", "set positive = true"]),
    "aggregation of an amount that the log lacks": (
        TOML + aggregate("amount"),
        ["[[aggregations]] 'a': value is \"amount\"", "Expected [interactions] label or weight"],
    ),
    "aggregation of a price that items lack": (
        TOML + ITEMS.replace('continuous = ["price"]', "") + aggregate("price"),
        ["'a': value is \"price\", but items have none", "Expected [items] price"],
    ),
    "aggregation of a price without items": (TOML + aggregate("price"), ["'a': value is \"price\", but items have none"]),
    "aggregation of events that are not positive": (
        TOML + "[events.view]\n[events.buy]\npositive = true\n" + aggregate("count") + 'events = ["view"]\n',
        ["'a': events names 'view', but only positive ones count. Expected 'buy'"],
    ),
    "event that is no section": (
        TOML + "[events]\nview = 0.1\n",
        ["[events] view is 0.1; expected a section", "Write [events.view] and its keys below it."],
    ),
    "event weight that is no number": (
        TOML + "[events.buy]\npositive = true\nweight = nan\n",
        ["[events] buy.weight", "finite number"],
    ),
}


@pytest.mark.parametrize("fault", BAD_DESCRIPTIONS)
def test_bad_description(shop, fault):
    toml, parts = BAD_DESCRIPTIONS[fault]
    text = message(shop(toml))
    assert "dataset.toml" in text
    for part in parts:
        assert part in text


BAD_LOGS = {
    "missing column": (TOML, "customer,sku\n1,1\n", ["column 'time' is not there", "Row 1 has: 'customer', 'sku'. Correct"]),
    "spaces in names": (TOML, "customer, sku, time\n1, 1, 1\n", ["column 'sku' is not there", "Row 1 has: 'customer', ' sku'"]),
    "UTF-16": (TOML, "customer,sku,time\n1,1,1\n".encode("utf-16"), ["row 1 holds zero bytes, as in UTF-16", "Expected UTF-8"]),
    "names that are not UTF-8": (
        TOML.replace('"sku"', '"Größe"'),
        "customer,Größe,time\n1,1,1\n".encode("cp1252"),
        ["column 'Größe' is not there", "It is not UTF-8: save or convert the file as UTF-8"],
    ),
    "gzip": (
        TOML,
        gzip.compress(EVENTS_CSV.encode()),
        ["is gzip without the ending .gz. Rename it to events.csv.gz, also in dataset.toml"],
    ),
    "quote without an end": (TOML, 'customer,sku,time\n1,"1,1\n2,2,2\n', ["row 2: Expected 3 columns", "close every quote"]),
    "unix times among date-times": (
        TOML,
        "customer,sku,time\n1,1,2020-01-01\n1,1,2020-01-02\n1,1,1577836800\n",
        ["column 'time', row 4: '1577836800' is not a time", "Write the whole column as"],
    ),
    "semicolons": (TOML, "customer;sku;time\n1;1;1\n", ["column 'customer' is not there", "separated by semicolons"]),
    "column twice": (TOML, "customer,sku,time,sku\n1,1,1,1\n", ["row 1 has the column 'sku' more than once"]),
    "empty file": (TOML, "", ["is empty", "Expected customer, sku, time in row 1"]),
    "header only": (TOML, "customer,sku,time\n", ["no usable row is left", "0 rows read"]),
    "unparsable time": (
        TOML,
        "customer,sku,time\n1,1,2020-01-01\n1,1,01/02/2020\n",
        ["column 'time', row 3: '01/02/2020' is not a time"],
    ),
    "impossible time": (
        TOML,
        "customer,sku,time\n1,1,2020-02-30\n",
        ["column 'time', row 2: '2020-02-30' is not a time", "unix seconds"],
    ),
    "text among unix times": (
        TOML,
        "customer,sku,time\n1,1,5\n1,1,6\n1,1,soon\n",
        ["column 'time', row 4: 'soon'", "unix time"],
    ),
    "days as numbers": (TOML, "customer,sku,time\n1,1,20200131\n1,1,20200201\n", ["row 2: '20200131' looks like a day"]),
    "seconds and milliseconds": (
        TOML,
        "customer,sku,time\n1,1,1500000000\n1,1,1500000001\n1,1,1500000000000\n",
        ["column 'time', row 4: '1500000000000' is no time in seconds"],
    ),
    "milliseconds and seconds": (
        TOML,
        "customer,sku,time\n1,1,1500000000000\n1,1,1500000001000\n1,1,1500000000\n",
        ["column 'time', row 4: '1500000000' is no time in milliseconds"],
    ),
    "negative item": (
        TOML,
        "customer,sku,time\n1,1,1\n1,-2,1\n",
        ["column 'sku', row 3: '-2' is a negative item id", "text ids"],
    ),
    "unparsable label": (
        LABELLED,
        "customer,sku,time,stars\n1,1,1,5\n1,1,1,good\n",
        ["column 'stars', row 3: 'good' is not a number"],
    ),
    "infinite label": (LABELLED, "customer,sku,time,stars\n1,1,1,inf\n", ["column 'stars', row 2: 'inf' is not a number"]),
    "no positive": (
        LABELLED,
        "customer,sku,time,stars\n1,1,1,1\n1,1,1,3.5\n",
        ["no row is positive", "'stars' goes from 1 to 3.5", "positive_at = 4 or more"],
    ),
    "unparsable weight": (
        TOML + 'weight = "n"',
        "customer,sku,time,n\n1,1,1,one\n",
        ["column 'n', row 2: 'one' is not a number"],
    ),
    "decimal comma": (
        TOML + 'weight = "n"',
        'customer,sku,time,n\n1,1,1,"2,5"\n',
        ["row 2: '2,5' is not a number", "decimal point"],
    ),
    "nothing left": (
        TOML,
        "customer,sku,time\n,1,1\n1,,1\n",
        ["no usable row", "1 rows dropped: no user", "1 rows dropped: no item"],
    ),
    "ragged row": (TOML, "customer,sku,time\n1,1,1\n\n1,1,1,1\n", ["row 4: Expected 3 columns, got 4", "commas"]),
    "not UTF-8": (TOML, b"customer,sku,time\n1,1,1\n\xff\xfe,1,1\n", ["row 3", "Expected UTF-8"]),
    "non-numeric context": (
        TOML + '[context]\ncontinuous = ["km"]\n',
        "customer,sku,time,km\n1,1,1,far\n",
        ["column 'km', row 2: 'far' is not a number", "leave unknown ones empty"],
    ),
    "number beyond float32": (
        TOML + 'weight = "n"',
        "customer,sku,time,n\n1,1,1,1\n1,1,1,1e39\n",
        ["column 'n', row 3: '1e39'", "beyond 3.4e38"],
    ),
    "row after a long text": (
        TOML,
        f"customer,sku,time,note\n1,1,1,{'a' * 200_000}\n1,1,soon,\n1,1,2,\n",
        ["column 'time', row 3: 'soon'"],
    ),
    "row after a quoted break": (TOML, 'customer,sku,time\n1,"a\nb",1\n1,1,soon\n1,1,2\n', ["column 'time', row 4: 'soon'"]),
}


@pytest.mark.parametrize("fault", BAD_LOGS)
def test_bad_log(shop, fault):
    toml, events, parts = BAD_LOGS[fault]
    text = message(shop(toml, **{"events.csv": events}))
    assert "events.csv" in text
    for part in parts:
        assert part in text


BAD_SIDE_FILES = {
    "nothing available": (
        ITEMS,
        "items.csv",
        "sku,description,brand,tags,price,in_stock\n10,,,,,0\n11,,,,,0\n12,,,,,0\n",
        ["column 'in_stock': none of the", "is available", "the other way round"],
    ),
    "no item of the log": (
        ITEMS,
        "items.csv",
        "sku,description,brand,tags,price,in_stock\nSKU-1,,,,,\n",
        ["column 'sku': none of its 1 ids is in the log: here they are like 'SKU-1', and in its column 'sku' like '10'"],
    ),
    "no user of the log": (
        USERS,
        "users.csv",
        "customer,country,age\n70,,\n",
        ["none of its 1 ids is in the log: here they are like '70'"],
    ),
    "duplicate item": (
        ITEMS,
        "items.csv",
        "sku,description,brand,tags,price,in_stock\n1,,,,,\n2,,,,,\n1,,,,,\n",
        ["'sku', row 4: '1' was already in row 2"],
    ),
    "non-numeric price": (
        ITEMS,
        "items.csv",
        "sku,description,brand,tags,price,in_stock\n1,,,,£3,\n",
        ["'price', row 2: '£3' is not a number"],
    ),
    "negative price": (
        ITEMS,
        "items.csv",
        "sku,description,brand,tags,price,in_stock\n1,,,,0,\n2,,,,-0.5,\n",
        ["'price', row 3: '-0.5' is below 0", "Write prices of 0 or more"],
    ),
    "negative price of price rules": (
        ITEMS.replace('continuous = ["price"]', 'price = "price"'),
        "items.csv",
        "sku,description,brand,tags,price,in_stock\n1,,,,-1,\n",
        ["'price', row 2: '-1' is below 0"],
    ),
    "unclear availability": (
        ITEMS,
        "items.csv",
        "sku,description,brand,tags,price,in_stock\n1,,,,,soon\n",
        ["'in_stock', row 2: 'soon' is neither 0 nor 1"],
    ),
    "negative item": (
        ITEMS,
        "items.csv",
        "sku,description,brand,tags,price,in_stock\n-1,,,,,\n",
        ["'sku', row 2: '-1' is a negative item id"],
    ),
    "missing item column": (ITEMS, "items.csv", "sku,description\n1,Tea\n", ["column 'tags' is not there"]),
    "duplicate user": (
        USERS,
        "users.csv",
        "customer,country,age\n1,,\n1,,\n",
        ["'customer', row 3: '1' was already in row 2", "one row for each id"],
    ),
    "non-numeric age": (USERS, "users.csv", "customer,country,age\n1,,old\n", ["'age', row 2: 'old' is not a number"]),
}


@pytest.mark.parametrize("fault", BAD_SIDE_FILES)
def test_bad_side_file(shop, fault):
    section, name, content, parts = BAD_SIDE_FILES[fault]
    text = message(shop(TOML + section, **{name: content}))
    assert name in text
    for part in parts:
        assert part in text


def test_a_message_names_the_file_where_it_was_found(shop, tmp_path, monkeypatch):
    monkeypatch.setenv("RECOMMENDER_DATA", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "catalogue.csv").write_text("sku,in_stock\n10,0\n11,0\n")
    section = '[items]\npath = "catalogue.csv"\nitem_id = "sku"\navailable = "in_stock"\n'
    assert message(shop(TOML + section)).startswith(f"{tmp_path / 'elsewhere' / 'catalogue.csv'}, column 'in_stock': none of")


def test_no_such_data_set():
    text = message("no-such-shop")
    assert "no data set 'no-such-shop'" in text
    assert "online-retail" in text
    assert text.endswith("Check the path.")


@pytest.mark.parametrize(
    ("written", "meant"),
    [("onlin-retail", "online-retail"), ("MovieLens", "movielens"), ("data/amazon-sport", "amazon-sports")],
)
def test_a_mistyped_name_of_a_bundled_data_set_is_recognised(written, meant):
    assert message(written).endswith(f"or synthetic:small. Did you mean {meant!r}?")


def test_folder_without_description(tmp_path):
    assert "dataset.toml does not exist" in message(tmp_path)


def test_missing_file_names_the_places_searched(shop, tmp_path, monkeypatch):
    monkeypatch.setenv("RECOMMENDER_DATA", "/somewhere/else")
    text = message(shop(TOML.replace("events.csv", "log.csv")))
    assert "'log.csv' is not there" in text
    assert str(tmp_path) in text
    assert "/somewhere/else" in text
    assert "set RECOMMENDER_DATA" in text


def test_quotes_that_a_tsv_file_leaves_as_they_are(shop):
    items = 'sku\ttitle\tin_stock\n9\tTea\t1\n10\t"Mug\t1\n11\tCup\t0\n12\t"Pot" of tea\t1\n'
    toml = TOML + '[items]\npath = "items.tsv"\nitem_id = "sku"\ntitle = "title"\navailable = "in_stock"\n'
    text = message(shop(toml, **{"items.tsv": items}))
    assert "items.tsv: column 'title', row 3: a quote at the beginning takes the next rows into the value. Write" in text


def test_a_folder_of_files_is_no_file(shop, tmp_path):
    (tmp_path / "events").mkdir()
    assert f"{tmp_path / 'events'} is a folder. Expected one file" in message(shop(TOML.replace("events.csv", "events")))


def test_unknown_kind_of_file(shop, tmp_path):
    (tmp_path / "events.json").write_text("{}")
    text = message(shop(TOML.replace("events.csv", "events.json")))
    assert "events.json: the kind of file is unknown" in text
    assert ".parquet" in text


@pytest.mark.parametrize(
    "content",
    [b"no gzip at all", gzip.compress(EVENTS_CSV.encode() * 50)[:-20], gzip.compress(b"")[:10] + b"\xff" * 50],
    ids=["plain", "cut short", "damaged"],
)
def test_broken_gzip(shop, content):
    text = message(shop(TOML.replace("events.csv", "events.csv.gz"), **{"events.csv.gz": content}))
    assert "events.csv.gz cannot be read to its end" in text


@pytest.mark.parametrize("share", [-0.1, 0.0, 1.0])
def test_impossible_share_of_later_events(shop, share):
    with pytest.raises(DataError, match=r"later_share is .* such as 0\.2"):
        split_log(load_dataset(shop()).interactions, share)


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("large", "'large' is not understood. Expected one of tiny, small, reference"),
        ("users=10,items=x,events=5", "'items=x' is not understood"),
        ("users=10,articles=20,events=50", "'articles=20' is not understood"),
        ("users=10,items=1__0,events=5", "'items=1__0' is not understood"),
        ("users=10,items=20", "events is not given"),
        ("users=10,items=20,events=5", "these sizes make no data set"),
    ],
)
def test_bad_synthetic_spec(spec, part):
    assert part in message(f"synthetic:{spec}")
