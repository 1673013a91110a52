"""Rules that are applied to a generation answer from the next request on, and can be taken back."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from export.relayout import relayout
from repository.applied_rules import (
    NAMES_FILE,
    VERSION_FILE,
    Version,
    apply_rules,
    compile_current_rules,
    find_rule_errors,
    find_rules_folder,
    list_versions,
    read_current_values,
    revert_rules,
)
from server.rules import app
from serving.contract.artifacts import find_stage_folder
from serving.contract.errors import ArtifactError, ConfigError
from serving.contract.generations import read_pinned_generation
from serving.contract.ids import stable_id
from serving.contract.tensors import ENSEMBLE
from serving.pipeline import Pipeline
from serving.stages.features.ids import ItemIndex
from serving.stages.live.content import FOLDER as CONTENT_FOLDER
from serving.stages.rules.applied import CURRENT_FILE, AppliedRules, name_catalogue
from serving.stages.rules.config import CONFIG_FILE, ITEM_RULES, ITEMS_FILE, RulesConfig
from serving.stages.rules.retrieval import NamedItems
from serving.stages.rules.rules import Rules
from tests.present import present
from tests.unit.live.answers import answer, upserted
from tests.unit.live.shops import repository_with_kinds

USERS = list(range(1, 31))


def call(*arguments: str | Path, repository: Path, code: int = 0) -> str:
    """Return the output of a command of `python -m server.rules`, whose exit code must be `code`."""
    command = [*map(str, arguments), "--repo", str(repository)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def apply_file(repository, tmp_path) -> Callable[..., str]:
    """apply_file(text, code=0) -> what the command says that applies a file of rules with this text."""
    path = tmp_path / "rules.toml"

    def apply(text: str, code: int = 0) -> str:
        path.write_text(text)
        return call("apply", path, repository=repository, code=code)

    return apply


def find_compiled(repository: Path, version: Version, generation: int = 1) -> Path:
    """Return the folder of a version's rules as compiled for a generation, whether it is there or not."""
    item_ids = ItemIndex.load(find_stage_folder(repository, "rerank", generation) / "item_ids.npy").ids
    return find_rules_folder(repository) / str(version.number) / name_catalogue(generation, item_ids)


def name_items(repository: Path) -> None:
    """Publish a text id for each item: "old-3" for item 3."""
    generation = read_pinned_generation(repository)
    ids = ItemIndex.load(find_stage_folder(repository, "rerank", generation) / "item_ids.npy").ids.tolist()
    names = {f"old-{item_id}": item_id for item_id in ids}
    (find_stage_folder(repository, ENSEMBLE, generation) / NAMES_FILE).write_text(json.dumps(names))


def test_applied_rules_answer_from_the_next_request_on_until_they_are_reverted(repository, reader):
    pipeline = Pipeline.load(repository, live=reader)
    before = answer(pipeline, USERS)["item_ids"]
    top = int(before[0, 0])
    assert apply_rules(repository, {"blocked_items": [top]}).number == 2
    blocked = answer(pipeline, USERS)["item_ids"]
    assert top not in blocked
    assert answer(Pipeline.load(repository, live=reader), USERS)["item_ids"].tolist() == blocked.tolist()
    apply_rules(repository, {"max_per_category": 3})
    assert top in answer(pipeline, USERS)["item_ids"]
    assert revert_rules(repository).number == 4
    assert answer(pipeline, USERS)["item_ids"].tolist() == blocked.tolist()
    revert_rules(repository, 1)
    assert answer(pipeline, USERS)["item_ids"].tolist() == before.tolist()
    assert [version.note for version in list_versions(find_rules_folder(repository))] == [
        "as exported",
        "",
        "",
        "version 2 again",
        "version 1 again",
    ]
    assert present(read_current_values(find_rules_folder(repository), "small"))["price_cap"] == 50.0
    assert read_current_values(find_rules_folder(repository), "another shop") is None


def test_retrieval_follows_the_pins(repository, reader):
    pipeline = Pipeline.load(repository, live=reader)
    retrieve = pipeline.stages["retrieve"]
    rules = retrieve.outputs.rules

    def find() -> list[int]:
        rules.follow(retrieve.search)
        return rules.items.padded_ids[rules.find_pinned(retrieve.search.servable)].tolist()

    assert find() == []
    apply_rules(repository, {"pinned": [{"item_id": 7, "slot": 0}, {"item_id": 5, "slot": 3}, {"item_id": 999, "slot": 1}]})
    assert find() == [5, 7]
    revert_rules(repository, 1)
    assert find() == []


def test_blocked_items_take_no_place_among_the_candidates(repository, reader, upsert):
    """A new item is blocked as soon as it is added, and comes once it is not blocked any more."""
    pipeline = Pipeline.load(repository, live=reader)

    def list_candidates() -> set[int]:
        return set(pipeline.trace({"user_id": np.array(USERS).reshape(-1, 1)})["candidate_ids"].ravel().tolist())

    assert {7, 8} < list_candidates()
    apply_rules(repository, {"blocked_items": [7, 999]})
    upserted(upsert, 999, kind="book", price=1.0)
    upserted(upsert, 8, available=False)
    assert not list_candidates() & {7, 8, 999}
    upserted(upsert, 8, available=True)
    upserted(upsert, 7, available=True)  # it is blocked all the same
    assert list_candidates() & {7, 8, 999} == {8}
    revert_rules(repository, 1)
    assert {7, 8, 999} < list_candidates()


def test_each_further_revert_goes_one_step_further_back(repository):
    for cap in (3, 4, 5):
        apply_rules(repository, {"max_per_category": cap})
    folder = find_rules_folder(repository)

    def revert() -> str:
        return revert_rules(repository).note

    assert [revert(), revert()] == ["version 3 again", "version 2 again"]
    apply_rules(repository, {"max_per_category": 6})  # in place of version 2
    assert [revert(), revert()] == ["version 2 again", "version 1 again"]
    with pytest.raises(ConfigError, match=r"No rules were in effect before version 1\. Name one"):
        revert_rules(repository)
    assert revert_rules(repository, 5).values == {"max_per_category": 4}
    assert revert() == "version 2 again"  # version 5 repeats version 3
    assert read_current_values(folder, "small") == {"max_per_category": 3}


def test_rules_hold_for_whichever_generation_answers(repository, reader):
    """The pinned one, the one before that still serves, and one that was published after the rules were applied."""
    top = int(answer(Pipeline.load(repository, live=reader), USERS)["item_ids"][0, 0])
    apply_rules(repository, {"blocked_items": [top]})
    assert relayout(repository_with_kinds(), repository, "ensemble") == 2
    pipelines = [Pipeline.load(repository, generation, live=reader) for generation in (1, 2)]
    assert all(top not in answer(pipeline, USERS)["item_ids"] for pipeline in pipelines)
    second = int(answer(pipelines[1], USERS)["item_ids"][0, 0])
    assert apply_rules(repository, {"blocked_items": [top, second]}).misfits == {}
    assert all(not {top, second} & set(answer(pipeline, USERS)["item_ids"].ravel()) for pipeline in pipelines)


def test_a_repository_that_is_made_again_gets_no_rules_of_the_former_one(repository, reader):
    """Both have a generation 1, and the former one had other items at these positions."""
    top = int(answer(Pipeline.load(repository, live=reader), USERS)["item_ids"][0, 0])
    compiled = find_compiled(repository, apply_rules(repository, {"blocked_items": [top]}))
    shutil.rmtree(compiled)
    shutil.copytree(find_stage_folder(repository, "rerank", 1), compiled)
    shutil.rmtree(repository)
    assert relayout(repository_with_kinds(), repository, "ensemble") == 1
    assert top not in answer(Pipeline.load(repository, live=reader), USERS)["item_ids"]


def test_versions_that_are_applied_daily_take_no_more_and_more_room(repository, reader):
    pipeline, folder = Pipeline.load(repository, live=reader), find_rules_folder(repository)

    def list_compiled() -> list[str]:
        return sorted(str(path.relative_to(folder)).partition("-")[0] for path in folder.glob("*/*") if path.is_dir())

    for cap in range(1, 6):
        apply_rules(repository, {"max_per_category": cap})
    assert list_compiled() == ["5/1", "6/1"]
    assert len(list_versions(folder)) == 6
    answered = answer(pipeline, USERS)["item_ids"]
    apply_rules(repository, {"max_per_category": 1})
    revert_rules(repository)
    assert answer(pipeline, USERS)["item_ids"].tolist() == answered.tolist()
    for generation in (2, 3, 4):
        assert relayout(repository_with_kinds(), repository, "ensemble") == generation
    assert list_compiled() == ["8/2", "8/3", "8/4"]


def test_a_generation_that_new_rules_do_not_fit_keeps_those_before(repository, reader, apply_file):
    relayout(repository_with_kinds(), repository, "ensemble")
    former = Pipeline.load(repository, 1, live=reader)
    top = int(answer(former, USERS)["item_ids"][0, 0])
    apply_rules(repository, {"blocked_items": [top]})
    shutil.rmtree(find_stage_folder(repository, "rerank", 1) / CONTENT_FOLDER)
    said = apply_file("max_per_category = 3\n")
    assert "version 3 is in effect (rules.toml): max_per_category" in said
    assert "generation 1 keeps its previous rules, because these do not fit it: " in said
    assert "offsets.npy cannot be opened as an array" in said
    assert top not in answer(former, USERS)["item_ids"]
    assert top in answer(Pipeline.load(repository, 2, live=reader), USERS)["item_ids"]


def test_a_published_generation_gets_the_rules_in_effect_unless_it_is_another_shops(repository):
    """As `export` does after a publication."""
    version = apply_rules(repository, {"max_per_category": 3})
    compiled = find_compiled(repository, version)
    for shop in ("another shop", version.shop):
        shutil.rmtree(compiled, ignore_errors=True)
        (compiled.parent / VERSION_FILE).write_text(json.dumps(vars(version) | {"shop": shop}))
        compile_current_rules(repository)
        assert compiled.exists() == (shop == version.shop)


def test_rules_compiled_for_the_items_of_another_repository_are_not_used(repository, reader):
    """Its live store may be this one's now: both repositories have a generation 1."""
    relayout(repository_with_kinds(), repository, "ensemble")
    top = int(answer(Pipeline.load(repository, live=reader), USERS)["item_ids"][0, 0])
    version = apply_rules(repository, {"blocked_items": [top]})
    for generation in (1, 2):
        compiled = find_compiled(repository, version, generation)
        others = np.load(compiled / ITEMS_FILE)
        others["blocked"][:-1] = ~others["blocked"][:-1]
        np.save(compiled / ITEMS_FILE, others)
        os.rename(compiled, compiled.with_name(name_catalogue(generation, np.arange(len(others) - 1))))
    pipelines = [Pipeline.load(repository, generation, live=reader) for generation in (1, 2)]
    assert all(answer(pipeline, USERS)["item_ids"][0, 0] == top for pipeline in pipelines)  # with the exported rules
    compile_current_rules(repository)  # as a server does before it starts
    for generation in (1, 2):
        assert top not in answer(Pipeline.load(repository, generation, live=reader), USERS)["item_ids"]


def test_what_a_killed_process_left_half_compiled_takes_no_effect(repository):
    version = apply_rules(repository, {"max_per_category": 3})
    compiled = find_compiled(repository, version)
    for lacks_rules in (False, True):
        draft = compiled.parents[1] / f".{version.number}"
        (draft / compiled.name).mkdir(parents=True)
        (draft / "7-0123456789abcdef").mkdir()
        (draft / compiled.name / ITEMS_FILE).touch()
        if lacks_rules:
            shutil.rmtree(compiled)
        compile_current_rules(repository)
        assert [path.name for path in compiled.parent.iterdir() if path.is_dir()] == [compiled.name]
        assert len(np.load(compiled / ITEMS_FILE)) > 0
        assert not draft.exists()


def test_a_generation_that_is_damaged_keeps_no_other_from_the_current_rules(repository, caplog):
    relayout(repository_with_kinds(), repository, "ensemble")
    version = apply_rules(repository, {"max_per_category": 3})
    for generation in (1, 2):
        shutil.rmtree(find_compiled(repository, version, generation))
    (find_stage_folder(repository, "rerank", 1) / CONFIG_FILE).write_text("{")
    compile_current_rules(repository)
    assert [find_compiled(repository, version, generation).exists() for generation in (1, 2)] == [False, True]
    assert "generation 1 keeps its rules, because version 2 does not fit it: rules: " in caplog.text


def test_rules_of_another_version_of_the_project_are_refused_with_a_remedy(tmp_path):
    facts = vars(Version(3, {}, "", "small", 1, 0.0)) | {"of_a_later_version": 1}
    (tmp_path / VERSION_FILE).write_text(json.dumps(facts))
    with pytest.raises(ArtifactError, match=r"does not describe rules .*'of_a_later_version'.* that wrote it, or move"):
        Version.read(tmp_path)


def test_versions_are_listed_from_the_oldest_to_the_latest_without_one_that_was_only_begun(tmp_path):
    for number in (9, 2, 10):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / VERSION_FILE).write_text(json.dumps(vars(Version(number, {}, "", "small", 1, 0.0))))
    (tmp_path / ".11").mkdir()
    assert [version.number for version in list_versions(tmp_path)] == [2, 9, 10]


def test_what_upsert_set_holds_under_new_rules_and_new_items_can_be_blocked(repository, reader, upsert):
    pipeline = Pipeline.load(repository, live=reader)
    top = int(answer(pipeline, [7])["item_ids"][0, 0])
    upserted(upsert, top, price=99.0)
    upserted(upsert, 1_000, kind="game", price=3.0)
    assert 1_000 in answer(pipeline, [7])["item_ids"]
    apply_rules(repository, {"price_cap": 50.0, "blocked_items": [1_000]})
    shown = answer(pipeline, [7])["item_ids"][0]
    assert 1_000 not in shown
    assert top not in shown[:3]


def test_a_new_item_with_a_text_id_is_blocked_by_its_text(repository, reader, upsert):
    name_items(repository)
    pipeline = Pipeline.load(repository, live=reader)
    for text in ("A-17", "2018"):
        upserted(upsert, stable_id(text), kind="game", price=3.0)
    assert np.isin([stable_id("A-17"), stable_id("2018")], answer(pipeline, USERS)["item_ids"]).all()
    apply_rules(repository, {"blocked_items": ["A-17"], "pinned": [{"item_id": 2018, "slot": 1}]})
    shown = answer(pipeline, USERS)["item_ids"]
    assert stable_id("A-17") not in shown
    assert (shown[:, 1] == stable_id("2018")).all()


def test_bad_rules_are_refused_with_everything_that_is_wrong_and_nothing_changes(repository, apply_file):
    said = apply_file('diversity = 7\nprice_cap = "high"\nno_such_rule = 1\n', code=1)
    for key in ("diversity", "price_cap", "no_such_rule"):
        assert key in said
    assert not find_rules_folder(repository).exists()
    assert apply_file("exploration = 3\n", code=1).endswith("novelty, seed.\n")
    unfit = {"pinned": [{"item_id": 1, "slot": 20}], "category_caps": {"boks": 1}, "blocked_items": ["x"]}
    facts = [str(finding) for finding in find_rule_errors(repository, unfit)]
    assert len(facts) == 3
    assert "Did you mean 'book'" in facts[2]
    with pytest.raises(ConfigError, match="no version 3"):
        revert_rules(repository, 3)
    with pytest.raises(ConfigError, match="No rules were applied"):
        revert_rules(repository)
    apply_file("[rules]\ndiversity = 0.5\n")
    assert "* 2" in call("list", repository=repository)


@pytest.mark.parametrize("is_new", [True, False])
def test_what_root_writes_belongs_to_the_owner_of_the_live_store(repository, monkeypatch, is_new):
    """Whoever runs this test is taken for root. A live store that root makes belongs to the repository's owner."""
    folder, given = find_rules_folder(repository), {}
    if not is_new:
        folder.parent.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda path, uid, gid, **_: given.update({Path(path).name: (uid, gid)}))
    version = apply_rules(repository, {"max_per_category": 3})
    owner = repository.stat()
    assert set(given.values()) == {(owner.st_uid, owner.st_gid)}
    written = {path.name for path in folder.rglob("*")} | {folder.name} | ({folder.parent.name} if is_new else set())
    renamed = {"current.json": ".current.json", "1": ".1", str(version.number): f".{version.number}"}
    assert given.keys() >= {renamed.get(name, name) for name in written}
    given.clear()
    monkeypatch.setattr(os, "geteuid", lambda: owner.st_uid or 1)
    apply_rules(repository, {"max_per_category": 4})
    assert not given


def test_rules_from_a_file_that_is_not_there_are_refused_with_the_reason(repository, tmp_path):
    expected = "absent.toml cannot be read: No such file or directory. Expected a TOML file; docs/settings.md lists the rules."
    with pytest.raises(ConfigError, match=expected):
        call("apply", tmp_path / "absent.toml", repository=repository)


def test_an_empty_file_removes_no_rules_but_an_empty_section_does(apply_file):
    with pytest.raises(ConfigError, match=r"rules\.toml: The file states no rule\. To remove all rules"):
        apply_file("")
    apply_file("[rules]\n")


@pytest.mark.parametrize("text", [None, "{", '{"version": "two"}'])
def test_rules_that_cannot_be_read_are_an_error_with_a_remedy(tmp_path, text):
    """text None: a file has the folder's name, and fails like a folder without permission."""
    folder = tmp_path / "rules"
    if text is None:
        folder.touch()
    else:
        folder.mkdir()
        (folder / CURRENT_FILE).write_text(text)
    exported = Rules(RulesConfig(), np.zeros(3, ITEM_RULES))
    with pytest.raises(ArtifactError, match=r"current\.json cannot be read.*as that user"):
        AppliedRules(folder, 1, np.arange(2), exported).read_if_new()


def test_pins_that_cannot_be_read_are_an_error_with_a_remedy():
    """The name of the folder is too long, and fails like a folder without permission."""
    with pytest.raises(ArtifactError, match=r"the rules in x+ cannot be loaded"):
        NamedItems.load(Path("x" * 300))


@pytest.mark.parametrize("has_names", [False, True])
def test_a_blocked_or_pinned_item_that_nobody_knows_is_told(repository, upsert, apply_file, has_names):
    """It may be mistyped, and the item that was meant would go on being shown."""
    known, new, unknown, unknown_pin = "3", "1000", "3333", "4444"
    if has_names:
        name_items(repository)
        known, new, unknown, unknown_pin = '"old-3"', '"new"', '"odl-3"', '"odl-4"'
    upserted(upsert, stable_id("new") if has_names else 1_000, price=3.0)
    pinned = ", ".join(f"{{ item_id = {item}, slot = {slot} }}" for slot, item in enumerate((unknown, unknown_pin)))
    said = apply_file(f"blocked_items = [{known}, {new}, {unknown}]\npinned = [{pinned}]\n")
    named = f"{unknown}, {unknown_pin}".replace('"', "")
    assert f"warning: neither the catalogue nor an upsert has {named}. Correct" in said
    assert "warning" not in apply_file(f"blocked_items = [{known}, {new}]\n")
