"""A small shop whose items have a kind, exported once for all tests that answer with a live store."""

from __future__ import annotations

from pathlib import Path

from tests.repositories import remove_code, shared_folder
from tests.unit.small_shops import PRICE, TOML, export, shop

N_ITEMS = 60
KINDS = ("book", "film", "game")  # item i is a KINDS[i % 3]
COLUMNS = PRICE + 'title = "name"\ncategorical = ["kind"]\ncategory = "kind"\n'


def repository_with_kinds() -> Path:
    """Return a repository of 30 users and 60 items; new items are shown in every list, items over 50.0 come last."""

    def build(folder: Path) -> None:
        from training.dataset import load_dataset

        shop(folder / "data", users=30, items=N_ITEMS, events=600)
        (folder / "data" / "dataset.toml").write_text(TOML + COLUMNS)
        rows = [f"{item},{item},{KINDS[item % 3]} number {item},{KINDS[item % 3]}" for item in range(1, N_ITEMS + 1)]
        (folder / "data" / "items.csv").write_text("\n".join(["sku,unit_price,name,kind", *rows, ""]))
        live = {"new_item_share": 1.0, "new_items": 8}
        remove_code(export(folder, load_dataset(folder / "data"), live=live, rules={"price_cap": 50.0}))

    return shared_folder("live", build) / "repository"
