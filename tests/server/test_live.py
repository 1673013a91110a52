"""The live loop on the real server: a purchase changes the next answer, a malformed event fails alone, nothing is lost."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from perf.figures import Figure
from perf.live import after as perf_after
from perf.live import items as perf_items
from perf.live import throughput as perf_throughput
from perf.live.exchange import connect
from perf.live.shop import Shop
from perf.live.visible import Events, Probes, ask_first_items, run_round
from perf.observe import read_samples
from perf.target import read_site
from repository.applied_rules import apply_rules, find_rules_folder
from server.helpers import generation_helpers
from server.launcher import TritonServer
from server.processes import find_members
from serving.contract.errors import ConfigError
from serving.contract.tensors import ENSEMBLE, OBSERVE, PAD_ID, UPSERT
from serving.live.events import unpack
from serving.live.reader import Reader
from serving.live.sequences import unpack_sequence
from serving.live.store import find_live_folder
from serving.pipeline import Pipeline
from serving.stages.live.measurements import PREFIX
from tests.monitoring import BACKEND_METRICS, named_metrics
from tests.repositories import SERVED_DATA
from tests.server.support.requests import infer_tensors, tensor
from training.dataset import load_dataset

USER, STRANGER = 7, 123_456_789
NEW_ITEM = 1_000_000


def answer_stranger(repository: Path) -> list[int]:
    """Return the items that an unknown user gets by the exported rules."""
    return list(map(int, Pipeline.load(repository)({"user_id": np.array([[STRANGER]])})["item_ids"][0]))


@pytest.fixture(scope="module")
def live_repository(fused_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose live store belongs to this module, with rules that were compiled for another repository alone."""
    repository = Path(shutil.copytree(fused_repository, tmp_path_factory.mktemp("live") / "model_repository"))
    version = apply_rules(repository, {"blocked_items": answer_stranger(repository)[:1]})
    for compiled in (find_rules_folder(repository) / str(version.number)).glob("*/"):
        compiled.rename(compiled.with_name("1-0123456789abcdef"))
    return repository


@pytest.fixture(scope="module")
def live_server(live_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with TritonServer(live_repository, run_dir=tmp_path_factory.mktemp("run")) as server:
        yield server


@pytest.fixture(scope="module")
def live_client(live_server: TritonServer) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(live_server.grpc_url) as client:
        yield client


@pytest.fixture
def reader(live_repository: Path) -> Iterator[Reader]:
    reader = Reader(find_live_folder(live_repository))
    yield reader
    reader.close()


def observe(client, user: int, item: int, **more) -> int:
    """Post an event and return its sequence."""
    return int(infer_tensors(client, OBSERVE, user_id=[[user]], item_id=[[item]], **more)["sequence"][0, 0])


def upsert(client, item: int, columns: bytes) -> int:
    return int(infer_tensors(client, UPSERT, kind=[[b"item"]], id=[[item]], columns=[[columns]])["sequence"][0, 0])


def recommend(client, user: int, **more) -> dict[str, np.ndarray]:
    return infer_tensors(client, ENSEMBLE, user_id=[[user]], **more)


def test_a_purchase_changes_the_next_answer(live_client):
    before = recommend(live_client, USER)["item_ids"][0]
    sequence = observe(live_client, USER, int(before[0]))
    after = recommend(live_client, USER, after=[[sequence]])
    assert before[0] not in after["item_ids"][0]
    assert after["item_ids"][0].tolist() != [*before[1:].tolist(), PAD_ID]
    assert after["degraded"].tolist() == [[0]]


def test_served_answers_equal_those_of_this_process_on_the_same_store(live_client, live_repository, reader):
    for user in range(20):
        observe(live_client, user, user + 1)
    users = np.arange(40).reshape(-1, 1)
    expected = Pipeline.load(live_repository, live=reader)({"user_id": users})
    served = [recommend(live_client, int(user)) for user in users]
    assert [answer["item_ids"][0].tolist() for answer in served] == expected["item_ids"].tolist()
    np.testing.assert_allclose(np.concatenate([answer["scores"] for answer in served]), expected["scores"], atol=1e-6)


def test_a_server_compiles_the_rules_in_effect_that_its_generations_lack(live_client, live_repository):
    top = answer_stranger(live_repository)[0]  # which these rules block
    assert top not in recommend(live_client, STRANGER)["item_ids"]


def test_a_malformed_event_fails_alone(live_client):
    def post(number: int) -> str:
        try:
            return str(observe(live_client, number, -1 if number % 3 == 0 else number))
        except InferenceServerException as error:
            return f"{error.status()} {error.message()}"

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(post, range(1, 31)))
    refused = [answer for answer in answers if not answer.isdigit()]
    assert len(refused) == 10
    assert all("INVALID_ARGUMENT" in answer and "item_id is negative" in answer for answer in refused)
    assert len({answer for answer in answers if answer.isdigit()}) == 20


def test_an_event_without_an_item_is_refused_by_name(live_client):
    event = [tensor("user_id", np.array([[USER]])), tensor("value", np.array([[1.0]], np.float32), "FP32")]
    with pytest.raises(InferenceServerException, match="has no item_id") as caught:
        live_client.infer(OBSERVE, event)
    assert "INVALID_ARGUMENT" in caught.value.status()


def test_the_same_event_id_has_one_sequence(live_client, reader):
    first = observe(live_client, USER, 5, event_id=[[b"order-1"]])
    with reader.snapshot() as snapshot:
        before = snapshot.read_progress().last_sequence
    assert observe(live_client, USER, 5, event_id=[[b"order-1"]]) == first
    with pytest.raises(InferenceServerException, match="event_id was used for an event of another user, item or name"):
        observe(live_client, USER, 6, event_id=[[b"order-1"]])
    with reader.snapshot() as snapshot:
        assert snapshot.read_progress().last_sequence == before


def test_a_sold_out_item_is_in_no_answer_and_a_new_one_in_some(live_client):
    shown = recommend(live_client, USER)["item_ids"][0]
    upsert(live_client, int(shown[0]), b'{"available": false}')
    assert shown[0] not in recommend(live_client, USER)["item_ids"][0]
    started_s = time.monotonic()
    upsert(live_client, NEW_ITEM, b'{"title": "a new item"}')
    users = iter(range(10_000))
    while NEW_ITEM not in recommend(live_client, next(users))["item_ids"][0]:
        assert time.monotonic() < started_s + 10.0


def served_metrics(server: TritonServer, is_current: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Return the metrics page, once it is current, by name; of several labels the largest value."""
    deadline_s = time.monotonic() + 10.0
    while True:
        metrics: dict[str, float] = {}
        for (name, _), value in read_samples(server.metrics_url).items():
            name = re.sub(r"_(bucket|sum|count)_total$", r"_\1", name)  # prometheus_client ends the name of each counter so
            metrics[name] = max(value, metrics.get(name, value))
        if is_current(metrics):
            return metrics
        assert time.monotonic() < deadline_s, metrics
        time.sleep(0.2)


def test_the_servers_metrics_say_where_the_log_stands(live_server, live_client, reader):
    with pytest.raises(InferenceServerException):
        observe(live_client, USER, -1)
    sequence = observe(live_client, USER, 9)
    observe(live_client, USER, 8, timestamp_ms=[[1_000_000_000_000]])
    recommend(live_client, USER, after=[[sequence]])
    with reader.snapshot() as snapshot:
        progress = snapshot.read_progress()

    durations = ("recommender_live_acknowledgement_seconds", "recommender_live_visible_seconds")

    def is_current(page: dict[str, float]) -> bool:  # each model publishes its own, once a second
        whole = [page.get(f"{name}_bucket", 0) == page.get(f"{name}_count") for name in durations]  # the largest, le="+Inf"
        return page.get("recommender_live_events_total") == progress.accepted and all(whole)

    metrics = served_metrics(live_server, is_current)
    assert metrics["recommender_live_late_events_total"] == progress.late >= 1
    assert metrics["recommender_live_refused_events_total"] >= 1
    assert 0 < metrics["recommender_live_store_bytes"] < metrics["recommender_live_store_limit_bytes"]
    assert 0 <= metrics["recommender_live_watermark_lag_seconds"] < 60
    for name in durations:
        assert 0 < metrics[f"{name}_sum"] < 10 * metrics[f"{name}_count"]


def test_every_live_metric_that_is_drawn_or_alerted_on_is_served(live_server):
    named = {name for name in named_metrics() if name.startswith(PREFIX)}
    assert len(named) >= 15
    served_metrics(live_server, lambda page: named - BACKEND_METRICS <= page.keys())


def test_the_servers_maintenance_runs_and_ends_with_it(live_server):
    log = live_server.run_dir / "logs" / f"live-maintain-{live_server.ports.grpc}.log"
    deadline_s = time.monotonic() + 30.0
    while "idle users forgotten" not in log.read_text():
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.1)
    while len(generation_helpers.find_helpers(live_server.state.tag)) > 1:  # the supervisor alone, until the next round
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert len(generation_helpers.find_helpers(live_server.state.tag)) == 1


@pytest.fixture
def shop(live_server: TritonServer) -> Shop:
    return Shop.of(read_site(live_server.state))


def values_of(figures: list[Figure]) -> dict[str, float]:
    return {figure.name: figure.median for figure in figures}


def test_perf_live_counts_answers_events_and_items_of_a_server(shop):
    rng = np.random.default_rng(0)
    asked = values_of(perf_after.measure(shop, 20, rng))
    assert asked["answers that name an event"] == 20
    assert asked["of these without their event"] == asked["acknowledged events that the log lacks"] == 0
    written = values_of(perf_throughput.measure(shop, 0.3, 1, rng, lambda _: None))
    assert written["durable events, 32 clients"] > 0
    assert written["acknowledged events that the log lacks"] == 0
    shown = values_of(perf_items.measure(shop, 2, 20, rng, lambda _: None))
    assert shown["answers that had an item which is now unavailable"] >= 20
    assert shown["of these that still have it"] == 0


def test_perf_live_sends_events_beside_requests(shop):
    rng = np.random.default_rng(0)
    with connect(shop.site.grpc_url) as exchange:
        probes = Probes(shop, exchange, ask_first_items(shop, exchange, shop.draw_users(10, rng)))
        run = run_round(shop, exchange, 200.0, Events(40.0, per_request=2), probes, 1.0, rng)
    assert run.events > len(probes.changed_ns) == len(probes.durable_ns) > 0
    assert (run.refused, probes.stale) == (0, 0)
    assert len(run.recommend_ns) > 0


def test_a_replay_knows_the_events_before_each_question(shop, live_repository):
    from experiments.replay import Replay, find_first_unseen_row  # it imports what trains, which takes each worker seconds
    from export.continuous.prequential import answer_frozen, choose_questions

    dataset = load_dataset(SERVED_DATA)
    end = len(dataset.interactions)
    rows = choose_questions(dataset.interactions, end - 200, end, most=5)
    replay = Replay(dataset, rows, answer_frozen(live_repository, dataset, rows).items)
    for _ in replay.take_steps(shop, end - 200, seconds=60.0):
        assert replay.make_line()
    assert (replay.events, len(replay.asked), replay.late) == (200, len(rows), 0)
    assert set(replay.make_document()) == {"replay", "events", "questions", "frozen", "live"}
    with pytest.raises(ConfigError, match="exported from the whole log"):
        find_first_unseen_row(dataset, live_repository)


def test_what_was_acknowledged_survives_a_kill_of_the_whole_server(live_server, live_client, reader):
    """The last test: it ends the server."""
    acknowledged = [observe(live_client, 900 + number, 3) for number in range(50)]
    for process in find_members(live_server.state.tag):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with another one
            process.kill()
    with reader.snapshot() as snapshot:
        log = dict(snapshot.read_events())
        users = unpack(log[unpack_sequence(sequence).place] for sequence in acknowledged).headers["user_id"]
        assert users.tolist() == list(range(900, 950))
        rows, records = snapshot.read_users(users)
    assert len(rows) == 50
    assert (records["history_ids"][:, 0] == 3).all()
