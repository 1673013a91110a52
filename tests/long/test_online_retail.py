"""The bundled shop's catalogue, made anew."""

import runpy
from pathlib import Path

import pandas as pd

PROJECT = Path(__file__).parents[2]


def test_the_catalogue_of_online_retail_is_what_its_script_makes():
    folder = PROJECT / "data" / "online-retail"
    for name, made in runpy.run_path(str(folder / "make_items.py"))["make_tables"]().items():
        committed = pd.read_csv(folder / name, dtype={"StockCode": str, "CustomerID": str})
        pd.testing.assert_frame_equal(made.reset_index(drop=True), committed)
