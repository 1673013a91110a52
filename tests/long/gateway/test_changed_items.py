"""Popular items and explanations reflect at once what `upsert` or rules have changed since the export."""

from __future__ import annotations

import asyncio
import errno
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from export.relayout import relayout
from live.__main__ import app as live
from repository.applied_rules import apply_rules, compile_for_generation, find_rules_folder, revert_rules
from repository.generations import pin
from serving.contract.artifacts import find_stage_folder
from serving.live.store import DATA_FILE, find_live_folder
from serving.stages.rules.applied import CURRENT_FILE
from tests.repositories import copy_generation, copy_to_change, small_repository
from tests.unit.gateway.conftest import Gateway, failing
from triton_recommender import Recommendations

USER = 7


def list_popular(door: Gateway) -> dict[int, str | None]:
    return {item["id"]: item["title"] for item in door.recommend(user=USER)["items"]}


def explain(door: Gateway, item: int) -> dict:
    return door.ask("GET", "/v1/explain", params={"user": USER, "item": item}).json()


def test_an_unavailable_item_is_not_popular_until_it_is_back(door, change):
    before = list_popular(door)
    item = next(iter(before))
    change(item, available=False)
    assert item not in list_popular(door)
    change(item, available=True, title="Mug")
    assert list_popular(door) == before | {item: "Mug"}


def test_who_asks_too_often_is_not_shown_an_item_that_has_just_become_unavailable(own_repo, door, change):
    item = next(iter(list_popular(door)))
    limited = Gateway(own_repo, failing(), requests_per_s=0.001, burst=1)
    assert item in list_popular(limited)
    change(item, available=False)
    assert item not in list_popular(limited)


@pytest.mark.parametrize("removed", [None, "", "  "])
def test_a_title_that_was_removed_is_shown_no_more(door, change, removed):
    item = next(iter(list_popular(door)))
    change(item, title="Mug")
    assert list_popular(door)[item] == "Mug"
    change(item, title=removed)
    assert list_popular(door)[item] is None
    assert list_popular(Gateway(door.repo, failing()))[item] is None


def test_an_item_that_was_added_since_the_export_needs_no_warning(door, change):
    assert door.recommend(user=USER, exclude="999")["warnings"]
    change(999, title="Mug")
    assert door.recommend(user=USER, exclude="999")["warnings"] == []


def test_what_live_forget_forgot_is_forgotten_with_the_next_generation(door, change):
    copy_generation(door.repo)
    title, generation = door.ask("GET", "/v1/items/3/similar").json()["item"]["title"], 1
    again = Gateway(door.repo, lambda query: Recommendations((3,), (1.0,), generation=generation))
    change(3, title="Mug")
    titles = [again.recommend(user=USER)["items"][0]["title"]]
    forgotten = CliRunner().invoke(live, ["forget", "--item", "3", "--repo", str(door.repo)], catch_exceptions=False)
    assert "columns forgotten: title 1" in forgotten.output
    titles.append(again.recommend(user=USER)["items"][0]["title"])
    generation = 2
    titles.append(again.recommend(user=USER)["items"][0]["title"])
    assert titles == ["Mug", "Mug", title]


def test_a_blocked_item_is_not_popular_until_its_rule_is_reverted(door):
    before = list_popular(door)
    item = next(iter(before))
    apply_rules(door.repo, {"blocked_items": [item]})
    blocked = list_popular(door)
    assert item not in blocked
    assert len(blocked) == len(before)  # the next popular one takes its place
    revert_rules(door.repo, 1)
    assert list_popular(door) == before


def test_what_is_hidden_since_the_export_is_similar_to_nothing(door, change):
    def list_similar() -> list[int]:
        return [item["id"] for item in door.ask("GET", "/v1/items/3/similar", params={"k": 5}).json()["items"]]

    first, second, *others = list_similar()
    apply_rules(door.repo, {"blocked_items": [first]})
    change(second, available=False)
    left = list_similar()
    assert left[: len(others)] == others
    assert len(left) == 5
    assert not {first, second} & set(left)


def test_an_item_that_the_export_blocks_is_not_popular_unless_other_rules_are_applied(tmp_path):
    repo = copy_to_change(small_repository(), tmp_path / "repository")
    item = next(iter(list_popular(Gateway(repo, failing()))))
    compile_for_generation(repo, tmp_path / "rules", 1, {"blocked_items": [item]})
    for path in (tmp_path / "rules").glob("*/*"):
        path.replace(find_stage_folder(repo, "rerank", 1) / path.name)
    door = Gateway(repo, failing())
    assert item not in list_popular(door)
    apply_rules(repo, {})
    assert item in list_popular(door)


def test_rules_that_cannot_be_read_leave_the_last_ones_and_cost_no_answer(door, caplog):
    item = next(iter(list_popular(door)))
    apply_rules(door.repo, {"blocked_items": [item]})
    assert item not in list_popular(door)
    (find_rules_folder(door.repo) / CURRENT_FILE).write_text("{")
    assert all(item not in list_popular(door) for _ in range(3))
    assert caplog.text.count("items that were blocked since may be shown") == 1


def find_shown(door: Gateway) -> int:
    return next(item for item in range(1, 31) if explain(door, item)["shown"])


def test_an_unavailable_item_is_explained_as_such(door, change):
    item = find_shown(door)
    change(item, available=False)
    told = explain(door, item)
    assert (told["shown"], told["why"]) == (False, "It is unavailable.")


def test_the_rule_that_drops_an_item_is_named(door):
    item = find_shown(door)
    apply_rules(door.repo, {"blocked_items": [item]})
    told = explain(door, item)
    assert (told["shown"], told["why"]) == (False, "A rule drops it: blocked_items.")
    assert told["rules"] == []  # it is no candidate, which the others moved up for
    assert [place["rank"] for place in told["places"]] == [None] * len(told["places"])


def test_a_live_store_that_may_not_be_entered_costs_no_answer(door, monkeypatch, caplog):
    """As after `sudo make serve`: the store belongs to root, and the gateway runs as somebody else."""
    exists = Path.exists

    def refuse(path: Path) -> bool:
        if path.name == DATA_FILE:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", refuse)
    again = Gateway(door.repo)
    answers = [again.recommend(user=USER), again.recommend(user=999, session="a3f")]
    assert [answer["degraded"] for answer in answers] == [[], []]
    assert "Serve as that user, or give the folder to the user who serves now" in caplog.text


def test_a_live_store_that_is_not_ours_costs_no_answer(door, caplog):
    folder = find_live_folder(door.repo)
    folder.mkdir(exist_ok=True)
    (folder / DATA_FILE).touch()
    folder.chmod(0o755)
    again = Gateway(door.repo)
    assert [again.recommend(user=user)["degraded"] for user in (USER, 999)] == [[], []]
    assert "chmod 700" in caplog.text


def test_names_of_a_generation_that_load_slowly_cost_no_deadline(door, monkeypatch):
    loaded, to_thread = asyncio.Event(), asyncio.to_thread

    async def load_slowly(*args):
        await loaded.wait()
        return await to_thread(*args)

    async def ask() -> list[int]:
        again = Gateway(door.repo, lambda query: Recommendations((3, 1), (2.0, 1.0), generation=2))
        asked = partial(again.ask_async, "GET", "/v1/recommendations?user=7", headers={"x-deadline-ms": "200"})
        met = [(await asked()).json()["generation"] for _ in range(2)]
        met.append((await again.ask_async("GET", "/v1/generation")).json()["generation"])
        loaded.set()
        while (await again.ask_async("GET", "/v1/generation")).json()["generation"] == 1:
            await asyncio.sleep(0.01)
        return met

    relayout(small_repository(), door.repo, "ensemble")
    pin(door.repo, 1)
    monkeypatch.setattr(asyncio, "to_thread", load_slowly)
    assert asyncio.run(asyncio.wait_for(ask(), 60)) == [2, 2, 1]
