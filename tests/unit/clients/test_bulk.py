"""recommend-all: the lists of many users in a file."""

from __future__ import annotations

import csv

import grpc
import pytest
from typer.testing import CliRunner

from tests.clocks import PatientClock
from tests.unit.clients.grpc_double import GrpcDouble
from triton_recommender import Query, Recommendations, Unavailable, bulk
from triton_recommender.cli import app
from triton_recommender.tensors import Degraded
from triton_recommender.testing import FakeRecommender


@pytest.fixture
def double():
    """Recommends two items that depend on the user, by a fallback for user 3, and none to user 4."""

    def answer(query):
        items = () if query.user_id == 4 else (10 * (query.user_id or 1), 20)
        scores = (2.5, 1.0)[: len(items)]
        return Recommendations(items, scores, Degraded.RANK if query.user_id == 3 else Degraded.NONE, generation=2)

    double = GrpcDouble(answer)
    yield double
    double.stop()


def run(users, lists, *options):
    return CliRunner().invoke(app, ["recommend-all", str(users), str(lists), *map(str, options)])


def read_rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path, text: str):
    path.write_text(text, "utf-8")
    return path


def test_every_user_gets_the_list_that_a_single_call_gives(double, tmp_path):
    users, lists = write(tmp_path / "users.txt", "\ufeff1\n\n 2 \r\n3\n4\n" + "2\n" * 40), tmp_path / "lists.csv"
    result = run(users, lists, "-k", 1, "--url", double.url, "--repo", tmp_path, "--context", "store=3", "--category", "mugs")
    assert result.exit_code == 0, result.stderr
    rows = read_rows(lists)
    assert [(row["user_id"], row["item_id"]) for row in rows] == [("1", "10"), ("2", "20"), ("3", "30")] + 40 * [("2", "20")]
    assert rows[2] == {
        "user_id": "3",
        "rank": "1",
        "item_id": "30",
        "title": "",
        "score": "2.5",
        "generation": "2",
        "degraded": "rank",
    }
    assert result.stdout == f"{lists}: 44 users, 43 items, 1 with fallback lists, 1 no items\n"
    sent = [call.inputs for call in double.fake.calls]
    assert {int(store) for inputs in sent for store in inputs["store"].flat} == {3}
    assert {category for inputs in sent for category in inputs["category"].flat} == {b"mugs"}


def test_names_and_titles_of_a_shop_whose_ids_are_text(double, repo, tmp_path):
    users, lists = write(tmp_path / "users.txt", "ann\nbob\n"), tmp_path / "lists.csv"
    double.fake.handler = lambda query: [10, 30]
    result = run(users, lists, "--url", double.url, "--repo", repo)
    assert [(row["user_id"], row["item_id"], row["title"]) for row in read_rows(lists)[:2]] == [
        ("ann", "ten", "new item 10 [red] café"),
        ("ann", "30", "new item 30 [red] café"),
    ]
    assert result.stdout == f"{lists}: 2 users, 4 items, 1 unknown, and so new visitors\n"


def test_a_server_that_restarts_is_waited_for(double, tmp_path, monkeypatch):
    monkeypatch.setattr(bulk, "PAUSE_S", 0.01)
    double.failures = [(grpc.StatusCode.UNAVAILABLE, "the server stops")] * 5  # more than a client tries in one call
    result = run(write(tmp_path / "users.txt", "1\n"), tmp_path / "lists.csv", "--url", double.url, "--repo", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert not double.failures
    assert len(read_rows(tmp_path / "lists.csv")) == 2


def test_servers_rest_as_long_as_the_answered_call_took(double, tmp_path, monkeypatch):
    naps_s = []

    class Clock(PatientClock):
        def sleep(self, seconds: float) -> None:
            naps_s.append(seconds)
            super().sleep(seconds)

    failures, clock = [Unavailable("the server stops")] * 3, Clock()

    def answer_after_2_s(query):
        if failures:
            raise failures.pop()
        clock.sleep(2.0)
        return [10]

    monkeypatch.setattr(bulk, "time", clock)
    bulk.write_lists(FakeRecommender(answer_after_2_s, retries=0), [Query(1)], tmp_path / "lists.csv")
    assert naps_s == [bulk.PAUSE_S] * 3 + [2.0, 2.0]


def test_without_an_answer_an_older_file_stays_as_it_is(double, tmp_path, monkeypatch):
    monkeypatch.setattr(bulk, "PAUSE_S", 0.01)
    monkeypatch.setattr(bulk, "PATIENCE_S", 0.1)
    double.failures = [(grpc.StatusCode.UNAVAILABLE, "the server stops")] * 1_000
    lists = write(tmp_path / "lists.csv", "of yesterday")
    result = run(write(tmp_path / "users.txt", "1\n"), lists, "--url", double.url, "--repo", tmp_path)
    assert result.exit_code == 1
    assert f"No server answers at {double.url}" in result.stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"lists.csv": "of yesterday", "users.txt": "1\n"}


def test_nobody_is_waited_for_at_an_address_where_nobody_answers(double, tmp_path, monkeypatch):
    clock = PatientClock()
    monkeypatch.setattr(bulk, "time", clock)
    double.stop()
    result = run(write(tmp_path / "users.txt", "1\n"), tmp_path / "lists.csv", "--url", double.url, "--repo", tmp_path)
    assert result.exit_code == 1
    assert f"No server answers at {double.url}" in result.stderr
    assert clock.monotonic() == 0.0
    assert [path.name for path in tmp_path.iterdir()] == ["users.txt"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"customer\n17850\n", "Line 1 of {users}: user_id is 'customer', a name; ids on the wire are whole numbers."),
        (b"1\n\n9223372036854775808\n", "Line 3 of {users}: user_id is 9223372036854775808; expected a whole number from"),
        (b"-4611686018427387905\n", "Line 1 of {users}: user_id is -4611686018427387905; expected a whole number from"),
        (b"\n \n", "{users} names no user; expected an id per line."),
        (b"caf\xe9\n", "{users} cannot be read: 'utf-8' codec can't decode"),
        (None, "{users} cannot be read: [Errno 2] No such file or directory"),
    ],
    ids=["heading", "beyond 64 bits", "a session's", "empty", "latin-1", "missing"],
)
def test_a_file_that_names_no_users_is_refused_before_anybody_is_asked(content, message, double, tmp_path):
    users = tmp_path / "users.txt"
    if content is not None:
        users.write_bytes(content)
    result = run(users, tmp_path / "lists.csv", "--url", double.url, "--repo", tmp_path)
    assert result.exit_code == 2
    assert message.format(users=users) in result.stderr
    assert not double.fake.calls


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/lists.csv", "cannot be written: [Errno 2] No such file or directory"),
        ("users.txt/lists.csv", "cannot be written: [Errno 20] Not a directory"),
        (f"{'x' * 300}.csv", "cannot be written: [Errno 36] File name too long"),
        (".", "is not a file; expected the name of a file to write."),
        ("folder", "is not a file; expected the name of a file to write."),
    ],
    ids=["no folder", "below a file", "too long", "this folder", "folder"],
)
def test_a_file_that_cannot_be_written_is_refused_before_anybody_is_asked(name, message, double, tmp_path):
    (tmp_path / "folder").mkdir()
    users, lists = write(tmp_path / "users.txt", "1\n"), tmp_path / name
    result = run(users, lists, "--url", double.url, "--repo", tmp_path)
    assert result.exit_code == 2
    assert f"{lists} {message}" in result.stderr
    assert not double.fake.calls
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "users.txt"}


def test_an_interruption_leaves_an_older_file_as_it_is(tmp_path):
    def interrupt(parts):
        yield parts[0]
        raise KeyboardInterrupt

    lists = write(tmp_path / "lists.csv", "of yesterday")
    with pytest.raises(KeyboardInterrupt):
        bulk.write_lists(FakeRecommender(lambda query: [10]), [Query(1)] * 100, lists, follow=interrupt)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"lists.csv": "of yesterday"}


def test_two_runs_at_once_leave_the_whole_lists_of_one(tmp_path):
    """As when a timer starts the next run before the last one has ended."""
    shop, lists = FakeRecommender(lambda query: [10]), tmp_path / "lists.csv"

    def run_another(parts):
        for part in parts:
            yield part
            bulk.write_lists(shop, [Query(2)], lists)

    bulk.write_lists(shop, [Query(1)] * 40, lists, follow=run_another)
    assert [row["user_id"] for row in read_rows(lists)] == ["1"] * 40
    assert [path.name for path in tmp_path.iterdir()] == ["lists.csv"]
