"""A shop in a folder: three small files and their dataset.toml, any of them replaced by a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.contract.errors import DataError
from training.dataset import load_dataset

TOML = """
name = "corner-shop"
[interactions]
path = "events.csv"
user_id = "customer"
item_id = "sku"
timestamp = "time"
"""
ITEMS = """
[items]
path = "items.csv"
item_id = "sku"
title = "description"
categorical = ["brand"]
multi_categorical = { tags = "|" }
continuous = ["price"]
category = "tags"
provider = "brand"
available = "in_stock"
"""
USERS = """
[users]
path = "users.csv"
user_id = "customer"
categorical = ["country"]
continuous = ["age"]
"""
EVENTS_CSV = "customer,sku,time\n7,10,300\n7,11,100\n8,10,200\n"
ITEMS_CSV = "sku,description,brand,tags,price,in_stock\n10,Tea,Acme,hot|drink,2.5,1\n12,Mug,,,,0\n"
USERS_CSV = "customer,country,age\n7,Italy,40\n9,,\n"


def message(source) -> str:
    """Return the message with which a data set is refused."""
    with pytest.raises(DataError) as caught:
        load_dataset(source)
    return str(caught.value)


@pytest.fixture
def shop(tmp_path):
    """shop(toml=…, **{"events.csv": …}) -> folder. Text or bytes per file; toml is the whole dataset.toml."""

    def write(toml: str = TOML, **files: str | bytes) -> Path:
        contents = {"events.csv": EVENTS_CSV, "items.csv": ITEMS_CSV, "users.csv": USERS_CSV, "dataset.toml": toml} | files
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path

    return write
