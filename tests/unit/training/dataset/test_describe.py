"""`python -m training.dataset describe`."""

from __future__ import annotations

from typer.testing import CliRunner

from tests.unit.training.dataset.conftest import ITEMS, TOML, USERS
from training.dataset.__main__ import app, collect_facts
from training.dataset.load import load_dataset


def test_facts_of_a_small_shop(shop):
    found = collect_facts(load_dataset(shop(TOML + ITEMS + USERS)))
    assert found["events"] == "3 (100.0% positive), 1970-01-01 00:01 to 1970-01-01 00:05 UTC"
    assert found["users"] == "2 in the log, 3 in all"
    assert found["items"] == "2 in the log, 3 in all, 2 available"
    assert found["density"] == "75.000% of user-item pairs; 0.0% of events repeat a pair"
    assert found["split"].startswith("2 events to train, 1 to test")
    assert found["item features"] == "brand, tags, price"
    assert found["context"] == "none"
    assert found["ids"] == "users: integers, kept, items: integers, kept"


def test_the_command_prints_the_report_and_refuses_in_one_line(shop):
    folder = shop(**{"events.csv": "customer,sku,time\n1,1,1\n,1,1\n"})
    good = CliRunner().invoke(app, ["describe", str(folder)])
    assert good.exit_code == 0
    assert "corner-shop" in good.output
    assert "1 rows dropped: no user" in good.output
    bad = CliRunner().invoke(app, ["describe", "no-such-shop"])
    assert bad.exit_code == 1
    assert bad.stderr.startswith("There is no data set 'no-such-shop'.")
    assert bad.stdout == ""


def test_the_command_prints_brackets_as_they_are(shop):
    """Rich takes words in brackets for styles."""
    toml = TOML.replace("corner-shop", "shop [green]") + 'label = "kind"\npositive_at = 5\n'
    rows = [f"{user},1,2020-01-0{day},{kind}" for user in range(4) for day, kind in ((1, 1), (2, 5))]
    folder = shop(toml, **{"events.csv": "\n".join(["customer,sku,time,kind", *rows, ""])})
    output = CliRunner().invoke(app, ["describe", str(folder)], terminal_width=200).output
    assert "shop [green]" in output
    assert "[pipeline] filter_seen = false" in " ".join(output.split())
