"""The command line against a server in this process."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from server.start.ports import find_free_ports
from tests.pages import serve_page
from tests.unit.clients.conftest import ANSWER, write_store
from tests.unit.clients.grpc_double import GrpcDouble, require_callers_certificate
from triton_recommender import Catalogue, Event, Recommendations
from triton_recommender.cli import app
from triton_recommender.display import compare_lists
from triton_recommender.tensors import Sources


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})


def test_a_table_with_titles(server, repo):
    result = run("recommend", "--user-id", 17850, "-k", 2, "--url", server.url, "--repo", repo)
    assert result.exit_code == 0
    assert "Recommendations for user 17850 (generation 2)" in result.stdout
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if "│" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["1", "30", "item 30 [red] café", "4.000"],
        ["2", "10", "item 10 [red] café", "3.000"],
    ]
    assert "note: answered by the fallback of rank, rerank." in result.stderr


def test_strict_without_a_repository_is_refused(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no model_repository is
    refused = run("recommend", "--user-id", 5, "--strict", "--url", server.url)
    assert refused.exit_code == 2
    assert "strict is set without a catalogue, so nothing would be refused. Give one (--repo of the commands)" in refused.stderr


def test_json_is_one_object_for_programs(server, repo):
    result = run("recommend", "--user-id", "ann", "-k", 1, "--json", "--url", server.url, "--repo", repo)
    document = json.loads(result.stdout)
    assert len(document.pop("request_id")) == 32
    assert document == {
        "user_id": "ann",
        "generation": 2,
        "degraded": ["rank", "rerank"],
        "items": [{"rank": 1, "item_id": 30, "title": "item 30 [red] café", "score": 4.0}],
    }
    assert result.stderr == ""


def test_options_reach_the_server(server, tmp_path):
    lists, context = ("--history", "1, 2", "--exclude", "3,4"), ("--context", "store=3", "--context", "device=a=b")
    settings = ("--category", "Küche", "--among", "5, 6", "--priority", 1, "--url", server.url, "--repo", tmp_path)
    run("recommend", "--user-id", 5, *lists, *context, *settings)
    sent = server.fake.calls[0].inputs
    assert sent["history"].tolist() == [[1, 2, -1, -1]]
    assert sent["exclude"].tolist() == [[3, 4, -1]]
    assert sent["store"].tolist() == [[3]]
    assert sent["device"].tolist() == [[b"a=b"]]
    assert sent["category"].tolist() == [["Küche".encode()]]
    assert sent["among"].tolist() == [[5, 6, *[-1] * 4]]
    assert server.parameters[0]["priority"].uint64_param == 1


def test_no_items_to_choose_from_are_refused(server, tmp_path):
    refused = run("recommend", "--user-id", 5, "--among", ",", "--url", server.url, "--repo", tmp_path)
    assert refused.exit_code == 2
    assert "among has 0 items; expected 1 to 6. Leave `among` out for the whole catalogue." in refused.stderr


def test_a_category_without_items_is_warned_of(tmp_path):
    server = GrpcDouble(lambda query: [] if query.category else [1])
    try:
        empty, full = (
            run("recommend", "--user-id", 5, *category, "--url", server.url, "--repo", tmp_path)
            for category in (("--category", "Bgas"), ())
        )
    finally:
        server.stop()
    assert "warning: no item of the category 'Bgas' can be shown. Check how" in empty.stderr
    assert "no item of the category" not in full.stderr


def test_names_of_a_shop_whose_ids_are_text(server, repo):
    run("recommend", "--user-id", "ann", "--exclude", "ten", "--url", server.url, "--repo", repo)
    sent = server.fake.calls[0].inputs
    assert sent["user_id"].tolist() == [[7]]
    assert sent["exclude"].tolist() == [[10, -1, -1]]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_catalogue_of_another_shop_is_warned_of(server, repo, options):
    np.save(repo / "recommend" / "2" / "item_ids.npy", np.array([10, 21, 31, 41]))
    result = run("recommend", "--user-id", "ann", "--url", server.url, "--repo", repo, *options)
    assert result.exit_code == 0
    assert f"warning: 3 of the 4 items, such as 30, are not in the catalogue of {repo}" in result.stderr
    assert "Name the server's own repository with --repo" in result.stderr
    assert "warning" not in result.stdout


def test_a_new_item_in_a_list_is_no_other_shop(server, repo):
    np.save(repo / "recommend" / "2" / "item_ids.npy", np.array([10, 20, 30, 41]))  # 40 is newer than the export
    result = run("recommend", "--user-id", "ann", "--url", server.url, "--repo", repo)
    assert (result.exit_code, "warning" in result.stderr) == (0, False)


def test_a_list_of_new_items_is_no_other_shop(repo):
    sources = (Sources.NEW_ITEMS, Sources.NEW_ITEMS | Sources.TWO_TOWER, Sources.NONE)
    server = GrpcDouble(lambda query: Recommendations((50, 60, 10), (3.0, 2.0, 1.0), sources=sources))
    try:
        result = run("recommend", "--user-id", "ann", "--url", server.url, "--repo", repo)
    finally:
        server.stop()
    assert (result.exit_code, "warning" in result.stderr) == (0, False)
    assert "60" in result.stdout


def test_an_anonymous_visitor_and_no_repository(server, tmp_path):
    empty = tmp_path / "[red]"  # would vanish as markup
    empty.mkdir()
    result = run("recommend", "--history", "", "--url", server.url, "--repo", empty)
    assert "for an anonymous visitor" in result.stdout
    assert f"note: no titles, as {empty} lacks generation 2" in result.stderr
    assert server.fake.calls[0].inputs["history"].tolist() == [[-1] * 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-k", 6], "error: k is 6; this server returns 5 items at most"),
        (["--context", "shop=3"], "error: context has no column 'shop'; this server knows store, device, basket."),
        (["--context", "store"], "error: --context is 'store'; expected a name and its value"),
        (["--user-id", "ann"], "error: user_id is 'ann', a name"),
        (["--timeout", 0], "error: Timeouts request is 0.0"),
    ],
)
def test_a_wrong_call_ends_with_2(server, tmp_path, arguments, message):
    result = run("recommend", *arguments, "--url", server.url, "--repo", tmp_path)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_repository_that_was_chosen_and_is_not_there_is_an_error(server, tmp_path):
    result = run("recommend", "--user-id", 17850, "--url", server.url, "--repo", tmp_path / "nowhere")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "nowhere/recommend/config.pbtxt cannot be read" in result.stderr


def test_users_are_named_one_a_line(repo, tmp_path):
    write_store(repo / "preprocess" / "10", [3, 5, 7, 8, 9], [10, 2, 50, 1, 4])
    assert run("users", "--repo", repo).stdout == "ann\n9\n8\n"
    nowhere = run("users", "--repo", tmp_path / "nowhere")
    assert (nowhere.exit_code, nowhere.stdout) == (1, "")
    assert "error: " in nowhere.stderr


def test_no_server_ends_with_1_and_says_how_to_start_one():
    url = f"localhost:{find_free_ports().grpc}"
    for command in ("recommend", "health"):
        result = run(command, "--url", url)
        assert result.exit_code == 1
        assert f"No server answers at {url}" in result.output
        assert "make serve REPO=" in result.output


def test_health(server):
    result = run("health", "--url", server.url)
    assert result.exit_code == 0
    assert f"{server.url} is ready: generation 2 answered, by the fallback of rank, rerank" in result.stdout
    server.ready = False
    result = run("health", "--url", server.url, "--json")
    assert result.exit_code == 1
    state = json.loads(result.stdout)
    assert state["ready"] is False
    assert state["endpoints"][0]["url"] == server.url
    assert "not ready" in state["endpoints"][0]["reason"]


def test_events_and_changes_are_acknowledged(server, repo):
    options = ("--url", server.url, "--repo", repo)
    event = ("observe", "--user-id", "ann", "--item-id", "ten", "--event", "view", "--event-id", "e-1", "--context", "store=3")
    assert run(*event, *options).stdout == "durable as 1\n"
    assert run(*event, *options, "--json").stdout == '{"sequence": 1}\n'
    assert server.fake.events == [Event(7, 10, "view", event_id="e-1", context={"store": 3})]
    assert run("upsert", "item", "ten", '{"price": 9.5}', *options).stdout == "durable as 2\n"
    assert server.fake.upserts == [("item", 10, {"price": 9.5})]
    wrong = run("upsert", "item", "ten", "price=3", *options)
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "columns is not JSON" in wrong.stderr


def test_an_event_of_an_item_that_the_catalogue_does_not_know_is_taken_with_a_warning(server, repo):
    """The id may be mistyped: then the event counts for an item that nobody has."""
    options = ("--url", server.url, "--repo", repo)
    assert run("observe", "--user-id", "ann", "--item-id", "ten", *options).stderr == ""
    result = run("observe", "--user-id", "ann", "--item-id", "tenn", *options)
    assert (result.exit_code, result.stdout) == (0, "durable as 2\n")
    assert result.stderr == "warning: no item is called 'tenn' in generation 10; treated as a new item.\n"


def test_a_purchase_shows_the_list_before_and_after_it(server, repo):
    result = run("buy", "--user-id", "ann", "-k", 2, "--url", server.url, "--repo", repo)
    assert result.exit_code == 0
    assert [(event.user_id, event.item_id) for event in server.fake.events] == [(7, 30)]
    assert [query.after for query in server.fake.queries] == [None, 1]
    assert "buys new item 30" in result.stdout
    assert "the changed list is there after" in result.stdout
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    assert [row[0] for row in rows] == ["1", "2"]


def test_unknown_names_are_warned_of_or_refused(server, repo):
    call = ("recommend", "--user-id", "bob", "--exclude", "tn", "--url", server.url, "--repo", repo)
    warned = run(*call)
    assert warned.exit_code == 0
    assert "warning: user_id: no user is called 'bob'" in warned.stderr
    assert "warning: exclude: no item is called 'tn'" in warned.stderr
    refused = run(*call, "--strict")
    assert (refused.exit_code, refused.stdout) == (2, "")


def test_titles_cannot_steer_the_terminal(server, repo):
    titles = ["\x1b[2Jgone", "\x9b31mred", "\u202efdp.exe", "plain"]
    (repo / "recommend" / "2" / "item_titles.json").write_text(json.dumps(titles))
    for options in ((), ("--json",)):
        shown = run("recommend", "--user-id", "ann", "--url", server.url, "--repo", repo, *options).stdout
        assert "[2Jgone" in shown
        assert not set("\x1b\x9b\u202e") & set(shown)


def test_a_catalogue_file_stands_in_for_the_folder(server, repo, tmp_path):
    document = tmp_path / "catalogue.json"
    document.write_text(run("catalogue", "--repo", repo).stdout)
    shown = run("recommend", "--user-id", "ann", "-k", 1, "--json", "--url", server.url, "--repo", document)
    assert json.loads(shown.stdout)["items"][0]["title"] == "new item 30 [red] café"


def test_a_catalogue_from_a_url_is_read_once_also_if_another_generation_answers(server, repo):
    pages = iter([run("catalogue", "--repo", repo).stdout.encode(), b"gone"])
    with serve_page(lambda: next(pages)) as url:
        shown = run("recommend", "--user-id", "ann", "-k", 1, "--json", "--url", server.url, "--repo", url)
    document = json.loads(shown.stdout)
    assert (document["generation"], document["items"][0]["title"]) == (2, "new item 30 [red] café")


def test_an_item_without_a_title_is_shown_by_its_id():
    before, changed = (Recommendations(item_ids, (0.0,) * len(item_ids)) for item_ids in ((0, 5), (7,)))
    table = compare_lists(before, changed, Catalogue())
    assert [list(column.cells) for column in table.columns] == [["1", "2"], ["0", "5"], ["7", ""]]


@pytest.mark.parametrize(
    "command",
    [
        ("recommend", "--user-id", 7),
        ("observe", "--user-id", 7, "--item-id", 30),
        ("buy", "--user-id", 7),
        ("upsert", "item", 30, '{"price": 9.5}'),
        ("health",),
    ],
    ids=lambda command: command[0],
)
def test_every_call_shows_its_certificate(certificates, command):
    key, certificate = certificates
    server = GrpcDouble(lambda query: ANSWER, require_callers_certificate(key, certificate))
    trust = ("--url", server.url, "--root-certificates", certificate)
    try:
        shown = run(*command, *trust, "--client-certificate", certificate, "--client-key", key)
        assert (shown.exit_code, shown.stderr.count("error")) == (0, 0)
        assert run(*command, *trust, "--timeout", 1).exit_code == 1
    finally:
        server.stop()
    halved = run(*command, *trust, "--client-certificate", certificate)
    assert halved.exit_code == 2
    assert "expected both, or neither" in halved.stderr
