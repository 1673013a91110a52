"""Lists that nobody was shown, judged by logs whose draws are known, in worlds whose true value is known."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from live.exposures import Exposure, ExposureLog
from repository.experiments import find_experiment_folder
from serving.stages.live.catalogue.listed_items import explore_newcomers
from serving.stages.rules.config import ITEM_RULES, NO_CAP
from serving.stages.rules.rules import hash_seed
from tests.unit.live.shops import repository_with_kinds
from tests.unit.trials.logs import events, exposures, observe
from trials.__main__ import app
from trials.interleaving import draft_teams
from trials.off_policy import TrialError
from trials.unseen import expect_rewards, pair_answers, read_lists

USERS = 6_000
LOOKED_AT = np.array([1.0, 0.6, 0.4, 0.3])  # share of users who look at a place
CERTAIN: list[float | None] = [1.0] * 3
LIKED = np.array([np.nan, 0.1, 0.6, 0.05, 0.5, 0.2])  # click rate of each item that is looked at


def click_each(items: list[int], draws: np.ndarray) -> np.ndarray:
    """Places do not influence each other."""
    return draws < LIKED[items] * LOOKED_AT[: len(items)]


def click_first(items: list[int], draws: np.ndarray) -> np.ndarray:
    """Users read from the top and leave with the first click."""
    clicks = draws < LIKED[items]
    return clicks & (clicks.cumsum() == 1)


def paired(lists, chances, judged, clicks_of, seed=0, **settings):
    """Pair logged lists of one user each with one judged list, or with one each.

    clicks_of: (items, draws in 0 … 1 by place) -> clicks
    """
    generator = np.random.default_rng(seed)
    rows = [
        {"request_id": str(user), "user_id": user, "item_ids": items, "propensities": known}
        for user, (items, known) in enumerate(zip(lists, chances, strict=True))
    ]
    clicked = [
        (str(user), item, False, np.nan, 1)
        for user, items in enumerate(lists)
        for item, clicked in zip(items, clicks_of(items, generator.random(len(items))), strict=True)
        if clicked
    ]
    each = judged if isinstance(judged[0], list) else [judged] * len(lists)
    return pair_answers(
        exposures(*rows), events(*clicked), dict(zip(map(str, range(len(lists))), each, strict=True)), **settings
    )


def draft_lists(champion: list[int], challenger: list[int]):
    drafted = [draft_teams(np.array(champion), np.array(challenger), str(user)) for user in range(USERS)]
    return [items.tolist() for items, _, _ in drafted], [chances.tolist() for _, _, chances in drafted]


def draw_each(champion: list[int], challenger: list[int]):
    """Every place is drawn for itself, with other probabilities than those of coins."""
    drawn = np.random.default_rng(2).random((USERS, len(champion))) < 0.3
    return np.where(drawn, challenger, champion).tolist(), np.where(drawn, 0.3, 0.7).tolist()


@pytest.mark.parametrize(
    ("kind", "draw", "generations", "judged", "clicks_of"),
    [
        ("independent", draw_each, ([1, 3], [2, 4]), [2, 4], click_each),
        ("cascade", draw_each, ([1, 3], [2, 4]), [2, 3], click_first),
        ("cascade", draft_lists, ([1, 2, 3, 4], [2, 1, 4, 3]), [2, 1, 4, 3], click_first),
        ("standard", draft_lists, ([1, 2, 3, 4], [2, 1, 4, 3]), [2, 1, 3, 4], click_first),
    ],
)
def test_lists_are_judged_by_those_that_draws_mixed(kind, draw, generations, judged, clicks_of):
    draws = np.random.default_rng(1).random((20_000, len(judged)))
    truth = np.mean([clicks_of(judged, row).sum() for row in draws])
    logged, chances = draw(*generations)
    answers = paired(logged, chances, judged, clicks_of)
    estimates, support = answers.estimate(kind)
    assert estimates["IPS"].low <= truth <= estimates["IPS"].high
    for estimate in estimates.values():
        assert estimate.high - estimate.low < 0.2 * truth
        assert estimate.value == pytest.approx(truth, abs=0.75 * (estimate.high - estimate.low))  # three standard errors
    assert support.value == pytest.approx(1.0, abs=0.05)


def show_new_items(generation: int, users: int, share: float) -> tuple[list[list[int]], list[list[float]]]:
    """Return lists of items 1, 3, 4 in which a share of the users sees item 2 or 5 in second place, and their propensities."""
    items = np.array([1, 3, 4, 2, 5])
    columns, chances = np.tile(np.arange(3), (users, 1)), np.ones((users, 3), np.float32)
    positions, rules = np.tile(np.array([0, 1, 2, 6, 7]), (users, 1)), np.zeros(9, ITEM_RULES)
    rules["cap"] = NO_CAP
    explore_newcomers(columns, chances, positions, 6, 8, rules, 0.0, np.arange(users), hash_seed(0, generation), share, 1)
    return items[columns].tolist(), chances.tolist()


@pytest.mark.parametrize("clicks_of", [click_each, click_first])
def test_generations_that_differ_in_the_new_items_they_show_are_judged(clicks_of):
    """The challenger shows new items to other users than the champion does."""
    judged, _ = show_new_items(2, USERS, 0.4)
    logged, chances = show_new_items(1, USERS, 0.4)
    draws = np.random.default_rng(1).random((USERS, 3))
    truth = np.mean([clicks_of(items, row).sum() for items, row in zip(judged, draws, strict=True)])
    answers = paired(logged, chances, judged, clicks_of)
    for kind in ("cascade", "standard"):
        estimates, support = answers.estimate(kind)
        for estimate in estimates.values():
            assert estimate.low <= truth <= estimate.high
            assert estimate.high - estimate.low < 0.3 * truth
            assert estimate.effective_samples == pytest.approx(USERS / 3, rel=0.1)  # 1 + two new items
        assert support.value == pytest.approx(1.0, abs=0.05)
    with pytest.raises(TrialError, match="judged items at their places"):
        answers.estimate("independent")  # it does not know that a new item moves the next one
    assert paired(logged, chances, judged, clicks_of, places=2).estimate("independent")[0]["IPS"].low > 0


@pytest.mark.parametrize("rest", [[2, 4], [2], []])
def test_intervals_hold_the_true_value_about_as_often_as_they_state(rest):
    """Two users of five would have got a shorter list, or none because the shadow failed: empty places earn nothing."""
    judged = [rest if user % 5 < 2 else [2, 4] for user in range(2_000)]
    truth = np.mean([LIKED[items] @ LOOKED_AT[: len(items)] for items in judged])
    held = {"IPS": 0, "SNIPS": 0, "DR": 0}
    for seed in range(20):
        lists = np.where(np.random.default_rng([seed, 1]).random((2_000, 2)) < 0.5, [2, 4], [1, 3]).tolist()
        answers = paired(lists, [[0.5, 0.5]] * 2_000, judged, click_each, seed)
        estimates, support = answers.estimate("independent")
        assert support.value == pytest.approx(1.0, abs=0.1)
        for name, estimate in estimates.items():
            held[name] += estimate.low <= truth <= estimate.high
    assert {name: count >= 17 for name, count in held.items()} == dict.fromkeys(held, True)


def test_a_longer_list_of_one_user_leaves_the_evidence_of_the_others():
    answers = paired([[2, 4]] * USERS, [[1.0, 1.0]] * USERS, [[2, 4], *[[2]] * (USERS - 1)], click_each)
    for name, estimate in answers.estimate("independent")[0].items():
        assert estimate.low <= LIKED[2] <= estimate.high, name


def test_what_items_earned_narrows_the_interval():
    """If nearly every item is clicked, the estimate varies only with how often the judged one is drawn."""
    logged, chances = draw_each([1, 3], [2, 4])
    answers = paired(logged, chances, [2, 4], lambda items, draws: draws < 0.9)
    estimates, _ = answers.estimate("independent")
    widths = {name: estimate.high - estimate.low for name, estimate in estimates.items()}
    assert widths["DR"] < 0.5 * widths["IPS"]
    assert widths["SNIPS"] < 0.5 * widths["IPS"]


def test_what_an_item_should_earn_is_learned_from_other_users():
    """Item 7 earned 1 in the first place with users of even numbers, and nothing with the others. Nobody was shown item 8."""
    users = np.arange(2_000)
    shown = np.tile([7, 9], (2_000, 1))
    rewards = np.column_stack([users % 2 == 0, np.zeros(2_000)]).astype(np.float64)
    expected = expect_rewards(shown, np.tile([7, 8], (2_000, 1)), rewards, users)
    assert expected[::2, 0] == pytest.approx(0.0)
    assert expected[1::2, 0] == pytest.approx(1.0)
    assert expected[:, 1] == pytest.approx(0.0)
    swapped = expect_rewards(shown, np.tile([8, 7], (2_000, 1)), rewards, users)
    assert swapped[1::2, 0] == pytest.approx(1.0)  # of an item that nobody saw there: what the place earns
    assert swapped[:, 1] == pytest.approx(0.0)  # item 7 was never in the second place
    assert expect_rewards(shown, np.full((2_000, 2), -1), rewards, users).max() == 0.0


def test_a_log_that_is_worth_too_few_users_says_why():
    judged, _ = show_new_items(2, 200, 0.4)
    with pytest.raises(
        TrialError, match=r"The log's 200 users are worth \d\d users .* expected 200 or more\. \d\d users were shown"
    ):
        paired(*show_new_items(1, 200, 0.4), judged, click_each).estimate("standard")


def test_the_estimate_is_not_what_the_shown_lists_earned():
    draws = np.random.default_rng(1).integers(1, 5, USERS)
    answers = paired([[int(item)] for item in draws], [[0.25]] * USERS, [2], lambda items, draws: draws < LIKED[items])
    estimates = answers.estimate("independent")[0]
    assert estimates.keys() >= {"IPS", "SNIPS", "DR"}
    for estimate in estimates.values():
        assert estimate.low <= LIKED[2] <= estimate.high
        assert answers.estimate_shown().high < estimate.low
        assert 0.2 * USERS < estimate.effective_samples < 0.3 * USERS


@pytest.mark.parametrize("kind", ["independent", "cascade", "standard"])
def test_the_shown_lists_are_no_lists_to_judge(kind):
    """Each agrees with its draws, so the estimate would be several times what they earned."""
    logged, chances = draw_each([1, 3], [2, 4])
    with pytest.raises(TrialError, match="as often as chance explains"):
        paired(logged, chances, logged, click_each).estimate(kind)


def test_places_that_were_certain_say_nothing_of_other_items():
    """A certain place tells what the shown item earned, and nothing of what another one would have."""
    logged = [[1, 2, 3, 4]] * 1_000, [[1.0] * 4] * 1_000
    judged = [1, 2, 4, 3]
    with pytest.raises(TrialError, match=r"could have shown 50% of the judged items .* expected 95% or more"):
        paired(*logged, judged, click_each).estimate("independent")
    with pytest.raises(TrialError, match="could have shown 0% of the judged items"):
        paired(*logged, judged, click_each).estimate("standard")
    top = paired(*logged, judged, click_each, places=2)
    estimates, support = top.estimate("standard")
    for estimate in estimates.values():
        assert estimate.value == pytest.approx(top.estimate_shown().value)
    assert support.value == 1.0


def test_draws_that_could_not_show_the_judged_item_are_no_support():
    """Half of the lists could have shown item 2 in the second place, by a draw; the others draw between 3 and 4."""
    drawn = np.random.default_rng(3).integers(2, size=4_000)
    lists = [[1, 2 + int(coin)] if user % 2 else [1, 3 + int(coin)] for user, coin in enumerate(drawn)]
    with pytest.raises(TrialError, match=r"could have shown 7[3-7]% of the judged items"):
        paired(lists, [[1.0, 0.5]] * 4_000, [1, 2], lambda items, draws: draws < 0.1).estimate("cascade")


def test_places_behind_short_lists_are_no_support():
    """One user in 25 asked for ten items, none of which the log could have shown; all others asked for one."""
    long = [user % 25 == 0 for user in range(1_000)]
    logged = [list(range(11, 21)) if is_long else [1] for is_long in long]
    judged = [list(range(31, 41)) if is_long else [1] for is_long in long]
    rows: list[dict[str, object]] = [{"request_id": str(user), "user_id": user} for user in range(1_000)]
    rows = [row | {"item_ids": items} for row, items in zip(rows, logged, strict=True)]
    known = [row | {"propensities": [1.0] * len(items)} for row, items in zip(rows, logged, strict=True)]
    lists = {str(user): items for user, items in enumerate(judged)}
    with pytest.raises(TrialError, match="could have shown 71% of the judged items"):
        pair_answers(exposures(*known), [], lists).estimate("independent")
    partly = [row | {"propensities": [None] * 10 if is_long else [1.0]} for row, is_long in zip(rows, long, strict=True)]
    with pytest.raises(TrialError, match="The propensity of 29% of the places is not known"):
        pair_answers(exposures(*partly), [], lists).estimate("cascade")


@pytest.mark.parametrize("unknown", [None, [None, None]])
def test_places_whose_probability_is_not_known_say_nothing(unknown):
    answers = paired([[1, 2]] * 1_000, [unknown] * 1_000, [1, 2], lambda items, draws: draws < 0.1)
    with pytest.raises(TrialError, match=r"could have shown 0% .* The propensity of 100% of the places is not known"):
        answers.estimate("independent")


def test_a_user_is_one_sample_however_many_answers_are_logged():
    usual = {"experiment": "", "arm": "", "item_ids": [1], "propensities": [1.0]}
    rows = [usual | {"request_id": str(row), "user_id": None if row < 200 else row % 50} for row in range(10_000)]
    lists = {str(row): [1] for row in range(10_000)}
    answers = pair_answers(exposures(*rows), [], lists)
    assert len(np.unique(answers.users)) == 250
    with pytest.raises(TrialError, match="worth 52 users"):
        answers.estimate("standard")


def test_shown_answers_without_a_judged_list_are_left_out():
    rows = exposures({"request_id": "a", "item_ids": [1]}, {"request_id": "b", "item_ids": [1], "arm": "shadow"})
    with pytest.raises(TrialError, match="No shown answer has a request id of the judged lists"):
        pair_answers(rows, [], {"b": [1]})


def test_too_few_users_are_told_as_such():
    rows = [{"request_id": str(row), "user_id": row % 60, "item_ids": [1], "propensities": [1.0]} for row in range(5_000)]
    with pytest.raises(TrialError, match="The 5,000 shown answers to judge by are of 60 users; expected 200 or more"):
        pair_answers(exposures(*rows), [], {str(row): [1] for row in range(5_000)})


@pytest.mark.parametrize(
    "line",
    [
        b'{"item_ids": [3]}',
        b'{"request_id": "b", "item_ids": "312"}',
        b'{"request_id": "b", "item_ids": [3.7]}',
        b'{"request_id": "b", "item_ids": [Infinity]}',
        b'{"request_id": "b", "item_ids": [9223372036854775808]}',
        b'{"request_id": "\xff", "item_ids": [3]}',
    ],
)
def test_a_line_that_is_no_answer_is_named(tmp_path, line):
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b'{"request_id": "a", "item_ids": [3, 1]}\n' + line + b"\n")
    with pytest.raises(TrialError, match=r"answers\.jsonl: line 2 is .*; expected an answer like"):
        read_lists(path)


def test_a_file_without_answers_is_named(tmp_path):
    (tmp_path / "answers.jsonl").touch()
    with pytest.raises(TrialError, match=r"answers\.jsonl has no line; expected one for each answer to judge"):
        read_lists(tmp_path / "answers.jsonl")


@pytest.fixture
def repo(tmp_path) -> Path:
    """A shop that showed items 1, 2, 3 to 400 users, half of whom bought item 1; the shadow had 2 and 3 the other way."""
    repo = Path(shutil.copytree(repository_with_kinds(), tmp_path / "repository"))
    users = np.arange(0, 400, 2)
    given = {"user_id": users, "item_id": np.ones(200), "request_id": [f"r{user}".encode() for user in users]}
    observe(repo, given | {"value": np.full(200, 3.0)})
    log, now_ms = ExposureLog(find_experiment_folder(repo), 1.0, 1, 1 << 30), time.time_ns() // 1_000_000
    for user in range(400):
        log.add(Exposure(f"r{user}", now_ms, user, 1, [1, 2, 3], [1.0] * 3, [], "e", "champion", propensities=CERTAIN))
        log.add(Exposure(f"r{user}", now_ms, user, 2, [1, 3, 2], [1.0] * 3, [], "e", "shadow", propensities=CERTAIN))
    log.close()
    return repo


def judge(repo: Path, *arguments: str) -> str:
    invoked = ["off-policy", *arguments, "--repo", str(repo)]
    return CliRunner().invoke(app, invoked, env={"COLUMNS": "200"}, catch_exceptions=False).stdout


def test_the_command_judges_a_shadow_as_far_as_it_agrees(repo):
    with pytest.raises(TrialError, match="could have shown 33% of the judged items"):
        judge(repo, "--generation", "2")
    told = json.loads(judge(repo, "--generation", "2", "--places", "1", "--reward", "value", "--json"))
    assert told["shown"]["value"] == 1.5
    kinds, estimators = ("standard", "independent", "cascade"), ("IPS", "SNIPS", "DR")
    assert set(told["estimates"]) == {f"{kind} {estimator}" for kind in kinds for estimator in estimators}
    assert told["estimates"]["cascade DR"]["value"] == pytest.approx(1.5)
    assert told["estimates"]["cascade DR"]["support"] == 1.0
    assert told["refused"] == {}
    with pytest.raises(TrialError, match="No answer of generation 7 as a shadow is logged"):
        judge(repo, "--generation", "7")


def test_the_command_judges_recorded_answers(repo, tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({"request_id": f"r{user}", "item_ids": [1, 2, 3]}) + "\n" for user in range(400)))
    table = judge(repo, "--answers", str(path))
    assert all(part in table for part in ("clicks an answer", "as shown", "cascade IPS", "0.5", "100.0%"))
    with pytest.raises(TrialError, match="expected --generation or --answers, one of them"):
        judge(repo, "--answers", str(path), "--generation", "2")


def test_recorded_answers_may_have_fewer_items_than_were_shown(repo, tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({"request_id": f"r{user}", "item_ids": [1, 2, -1]}) + "\n" for user in range(400)))
    told = json.loads(judge(repo, "--answers", str(path), "--json"))
    assert (told["places"], told["refused"]) == (2, {})
    assert [estimate["value"] for estimate in told["estimates"].values()] == pytest.approx([0.5] * 9)
    assert told == json.loads(judge(repo, "--answers", str(path), "--places", "2", "--json"))


def test_estimators_that_ask_too_much_are_told_apart(repo, tmp_path):
    """One item more leaves the other places alone, but makes some lists ones that were never shown."""
    path = tmp_path / "answers.jsonl"
    lists = {f"r{user}": [1, 2, 3] if user >= 40 else [1, 2, 4] for user in range(400)}
    path.write_text("".join(json.dumps({"request_id": name, "item_ids": items}) + "\n" for name, items in lists.items()))
    table = judge(repo, "--answers", str(path))
    assert all(f"independent {estimator}" in table for estimator in ("IPS", "SNIPS", "DR"))
    assert "standard: The log could have shown 90% of the judged items" in table


def test_popular_items_of_a_gateway_are_left_out_and_counted(repo):
    """No generation chose them, though they are logged as certain. Here they earn nothing, and the judged list has them."""
    log, now_ms = ExposureLog(find_experiment_folder(repo), 1.0, 1, 1 << 30), time.time_ns() // 1_000_000
    for user in range(400, 1_000):
        marks = ["gateway_fallback"]
        log.add(Exposure(f"r{user}", now_ms, user, 1, [1, 2, 3], [None] * 3, marks, "e", "champion", propensities=CERTAIN))
        log.add(Exposure(f"r{user}", now_ms, user, 2, [1, 2, 3], [1.0] * 3, [], "e", "shadow", propensities=CERTAIN))
    log.close()
    told = json.loads(judge(repo, "--generation", "2", "--places", "1", "--json"))
    assert (told["shown"]["value"], told["shown"]["decisions"], told["fallbacks"]) == (0.5, 400, 600)
    assert told["estimates"]["standard IPS"]["value"] == pytest.approx(0.5)
    assert "600 shown answers are left out: the gateway's popular items" in judge(repo, "--generation", "2", "--places", "1")


def test_failed_shadows_earn_nothing_and_are_counted(repo):
    log, now_ms = ExposureLog(find_experiment_folder(repo), 1.0, 1, 1 << 30), time.time_ns() // 1_000_000
    for user in range(400, 1_400):
        log.add(Exposure(f"r{user}", now_ms, user, 1, [1, 2, 3], [None] * 3, [], "e", "champion", propensities=CERTAIN))
        items, marks = ([], ["challenger"]) if user < 800 else ([1, 2, 3], list[str]())
        log.add(Exposure(f"r{user}", now_ms, user, 3, items, [None] * len(items), marks, "e", "shadow"))
    log.close()
    buyers = np.arange(400, 1_400, 2)
    observe(repo, {"user_id": buyers, "item_id": np.ones(500), "request_id": [f"r{user}".encode() for user in buyers]})
    told = json.loads(judge(repo, "--generation", "3", "--json"))
    assert (told["judged"], told["failed"], told["shown"]["value"]) == (1_000, 400, 0.5)
    assert [estimate["value"] for estimate in told["estimates"].values()] == pytest.approx([0.3] * 9)
    assert "400 of the 1,000 judged lists are empty, because the shadow failed" in judge(repo, "--generation", "3")


def test_only_fallbacks_or_empty_lists_are_nothing_to_judge_by():
    rows = exposures({"request_id": "a", "item_ids": [1], "degraded": ["gateway_fallback"], "propensities": [1.0]})
    with pytest.raises(TrialError, match=r"No shown answer but the gateway's popular items, which no generation chose \(1\)"):
        pair_answers(rows, [], {"a": [1]})
    with pytest.raises(TrialError, match="All judged lists of the 6,000 shown answers are empty"):
        paired([[1]] * USERS, [[1.0]] * USERS, [[]] * USERS, click_each)


def test_the_latest_answers_of_a_long_shadow_are_judged_and_the_command_says_so(repo, monkeypatch):
    monkeypatch.setattr("trials.unseen.MOST_JUDGED", 250)
    monkeypatch.setattr("trials.__main__.MOST_JUDGED", 250)
    found = json.loads(judge(repo, "--generation", "2", "--places", "1", "--json"))
    assert (found["judged"], found["shown"]["decisions"]) == (250, 250)
    assert "Only the shadow's latest 250 answers are judged, since 20" in judge(repo, "--generation", "2", "--places", "1")
