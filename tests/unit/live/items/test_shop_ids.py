"""Commands of the live store take users and items as the shop writes them."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from live.ids import find_item_id, find_user_id
from serving.contract.errors import ConfigError, RecommenderError
from serving.contract.ids import stable_id
from serving.contract.tensors import ENSEMBLE
from serving.live.events import ITEM_CHANGED
from serving.live.layout import Layout
from serving.live.store import find_live_folder
from serving.live.writer import Writer
from tests.unit.live.batches import KINDS, START_MS, change, purchase
from tests.unit.live.commands import call

NAMES = {"anna": 17, "bert": 4, "12": 99}


@pytest.fixture
def publish(tmp_path):
    def write(names: dict[str, int] | None):
        folder = tmp_path / ENSEMBLE / "2"
        folder.mkdir(parents=True)
        (tmp_path / ENSEMBLE / "config.pbtxt").write_text("version_policy { specific { versions: 2 } }")
        if names is not None:
            (folder / "user_names.json").write_text(json.dumps(names))
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("user", "expected"),
    [("anna", 17), (" anna ", 17), ("12", 99), ("17", 17), ("carla", stable_id("carla")), ("13", stable_id("13"))],
    ids=["a name", "with spaces", "a name of digits", "an id on the wire", "came since the export", "digits, and no id"],
)
def test_a_shop_whose_ids_are_text(publish, user, expected):
    assert find_user_id(publish(NAMES), user) == expected


def test_a_blank_user_is_refused(publish):
    with pytest.raises(ConfigError, match="user is empty"):
        find_user_id(publish(NAMES), " ")


def test_an_item_has_a_name_of_its_own(publish):
    repo = publish(NAMES)
    (repo / ENSEMBLE / "2" / "item_names.json").write_text('{"anna": 5}')
    assert (find_item_id(repo, "anna"), find_user_id(repo, "anna")) == (5, 17)


def test_a_new_user_never_gets_the_id_of_a_published_one(publish):
    repo = publish({"anna": stable_id("carla"), "bert": stable_id("carla", 1)})
    assert find_user_id(repo, "carla") == stable_id("carla", 2)


def test_a_shop_whose_ids_are_numbers(publish):
    repo = publish(None)
    assert find_user_id(repo, "17850") == 17850
    assert find_user_id(repo, "-5") == -5
    for user in ("017", "9223372036854775808"):
        with pytest.raises(ConfigError, match=f"user is '{user}'; this shop's ids are whole numbers"):
            find_user_id(repo, user)


def test_a_store_that_outlived_its_repository(tmp_path):
    assert find_user_id(tmp_path / "gone", "17850") == 17850
    assert find_user_id(tmp_path / "gone", "anna") == stable_id("anna")
    assert find_user_id(tmp_path / "gone", "9223372036854775808") == stable_id("9223372036854775808")  # no int64


def test_without_a_known_generation_no_user_is_guessed(publish):
    """It may be a shop whose ids are text, in which 12 is a name."""
    repo = publish(NAMES)
    (repo / ENSEMBLE / "config.pbtxt").unlink()
    with pytest.raises(RecommenderError):
        find_user_id(repo, "12")


def test_names_that_cannot_be_read_are_no_reason_to_guess(publish):
    repo = publish(NAMES)
    (repo / ENSEMBLE / "2" / "user_names.json").write_text('{"anna": 1')
    with pytest.raises(RecommenderError, match=r"user_names\.json cannot be read"):
        find_user_id(repo, "12")


def test_a_users_history_names_items_as_the_shop_writes_them(publish):
    """The sofa was published, the lamp was added since by `upsert`, and nobody has told what the third item is called."""
    repo, lamp, unnamed = publish(NAMES), stable_id("lamp"), 3
    (repo / ENSEMBLE / "2" / "item_names.json").write_text('{"sofa": 5}')
    with closing(Writer(find_live_folder(repo), Layout(), KINDS.names, now_ms=lambda: START_MS)) as writer:
        writer.append(change(ITEM_CHANGED, lamp, item_id="lamp"))
        for item in (5, lamp, unnamed):
            writer.append(purchase(NAMES["anna"], item))
    shown = call("inspect", "--user", "anna", "--repo", repo)
    assert "User anna: 3 events" in shown
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("│")] == ["3", "lamp", "sofa"]


def test_a_terminal_obeys_no_text_of_a_shop(publish):
    repo, evil = publish(NAMES), "\x1b[2Jgone\x9b31m\u202efdp"
    (repo / ENSEMBLE / "2" / "item_names.json").write_text('{"sofa": 5}')
    with closing(Writer(find_live_folder(repo), Layout(), KINDS.names, now_ms=lambda: START_MS)) as writer:
        writer.append(change(ITEM_CHANGED, stable_id(evil), item_id=evil, title=evil))
        writer.append(purchase(NAMES["anna"], stable_id(evil)))
    for asked in (("--user", "anna"), ("--item", evil)):
        shown = call("inspect", *asked, "--repo", repo)
        assert "[2Jgone" in shown
        assert not set(shown) & set(evil[:1] + "\x9b\u202e")
