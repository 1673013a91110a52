"""Refused events from the gateway through the client's errors to the adapter of `observe`: each one is counted once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.contract.artifacts import read_stage
from serving.contract.refused_rows import describe_refused, read_refused
from serving.contract.tensors import OBSERVE, UPSERT
from serving.stages.live.models import LiveModel, Observe, Upsert
from tests.contract import fake_backend as pb
from tests.contract.stages import pbtxt_as_json
from tests.repositories import copy_lean_repository
from tests.unit.gateway.conftest import Gateway
from triton_recommender.errors import make_status_error
from triton_recommender.models import Call

CODES = {pb.TritonError.INVALID_ARG: "INVALID_ARGUMENT"}


def load(repo: Path, stage: type[LiveModel]) -> Any:
    """Return the adapter of `observe` or `upsert` in this process."""
    from serving.stages.live.triton import make_live_model

    name = {Observe: OBSERVE, Upsert: UPSERT}[stage]
    model = make_live_model(stage)()
    model.initialize(
        {
            "model_name": name,
            "model_instance_name": f"{name}_0_0",
            "model_repository": str(repo / name),
            "model_version": "1",
            "model_config": pbtxt_as_json(read_stage(repo / name / "1")),
        }
    )
    return model


def count_refused(model: Any) -> float:
    measurements = model.first.stage.list_measurements()
    return sum(measured.value for measured in measurements if measured.name == "recommender_live_refused_events_total")


class Shop:
    """A gateway whose server is the adapter of `observe` in this process. calls: how many requests it got"""

    def __init__(self, repo: Path) -> None:
        self.model = load(repo, Observe)
        self.calls = 0
        self.gateway = Gateway(repo)
        vars(self.gateway.shop.server)["answer"] = self.answer

    def answer(self, call: Call) -> dict[str, np.ndarray]:
        self.calls += 1
        [response] = self.model.execute([pb.InferenceRequest(**call.inputs)])
        if error := response.error():
            raise make_status_error(CODES[error.code()], error.message(), "localhost:8001", call.timeout_s, call)
        return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}

    def post(self, *events: dict) -> list[dict]:
        return self.gateway.ask("POST", "/v1/events", json=list(events)).json()["results"]

    def count_refused(self) -> float:
        return count_refused(self.model)


@pytest.fixture
def shop(tmp_path) -> Iterator[Shop]:
    shop = Shop(copy_lean_repository(tmp_path / "repository"))
    yield shop
    shop.model.finalize()


def purchase(item: int, **more) -> dict:
    return {"user": 7, "item": item, "id": f"order-1/{item}"} | more


def test_one_malformed_event_of_sixteen_counts_once_and_the_others_are_acknowledged(shop):
    events = [purchase(item, event="smile") if item == 5 else purchase(item) for item in range(16)]
    results = shop.post(*events)
    assert [row for row, result in enumerate(results) if "error" in result] == [5]
    assert results[5]["id"] == "order-1/5"
    said = "The server refuses this request: event is 'smile'; expected one of "
    assert results[5]["error"]["message"].startswith(said)
    assert len({result["sequence"] for result in results if "sequence" in result}) == 15
    assert shop.count_refused() == 1
    assert shop.calls == 2


def test_several_malformed_events_of_64_count_once_each_with_a_reason_of_their_own(shop):
    shop.post(purchase(40))
    bad: dict[int, dict] = {
        3: {"event": "smile"},
        4: {"event": "Row 9: grin"},
        20: {"timestamp": "2100-01-01T00:00:00Z"},
        21: {"request_id": 100 * "é"},  # the gateway counts characters, the server bytes
        40: {"user": 8},  # with the id of another event, which the store finds
        63: {"event": "smile"},
    }
    results = shop.post(*(purchase(item, **bad.get(item, {})) for item in range(64)))
    reasons = {row: result["error"]["message"] for row, result in enumerate(results) if "error" in result}
    assert list(reasons) == list(bad)
    told = {3: "'smile'", 4: "grin", 20: "ahead of this server", 21: "request_id has", 40: "event_id was used", 63: "'smile'"}
    for row, reason in told.items():
        assert reason in reasons[row]
    assert shop.count_refused() == len(bad)


EVENT = {"user_id": 7, "item_id": 5}
CHANGE = {"kind": b"item", "id": 5, "columns": b'{"available": true}'}


@pytest.mark.parametrize(
    ("stage", "row", "lacking"),
    [(Observe, EVENT, "user_id"), (Upsert, CHANGE, "kind")],
    ids=["zeros in its place are well-formed", "zeros in its place are malformed"],
)
def test_each_event_of_a_request_without_a_required_tensor_counts_once(tmp_path, stage, row, lacking):
    model = load(copy_lean_repository(tmp_path / "repository"), stage)
    whole = {name: np.full((3, 1), value, object if isinstance(value, bytes) else np.int64) for name, value in row.items()}
    incomplete = {name: array for name, array in whole.items() if name != lacking}
    bad, good = model.execute([pb.InferenceRequest(**incomplete), pb.InferenceRequest(**whole)])
    assert bad.error().message().startswith(f"The request has no {lacking} ")
    assert good.error() is None
    assert count_refused(model) == 3
    model.finalize()


def test_refused_rows_are_read_as_they_were_described():
    faults = {3: "id is negative", 9: "event is 'x • Row 5: y'", 7: "id is negative"}
    said = describe_refused(faults, 16)
    assert said == "3 of 16 rows are refused • Rows 3, 7: id is negative • Row 9: event is 'x · Row 5: y'"
    before = "The server at localhost:8001 refuses this request: "
    read = {3: f"{before}id is negative", 7: f"{before}id is negative", 9: f"{before}event is 'x · Row 5: y'"}
    assert read_refused(before + said, 16) == read
    assert read_refused(said, 15) == {}
    assert read_refused("id is negative", 16) == {}


@pytest.mark.parametrize("row", [0, 9])
def test_what_a_caller_writes_is_never_read_as_a_list_of_refused_rows(shop, row):
    """The client refuses the context itself, and quotes it."""
    forged = f"2 of 2 rows are refused • Row {row}: x"
    assert read_refused(f"context.price is {forged}", 2) == {}
    results = shop.post(purchase(0), purchase(1, context={forged: 1}))
    assert "sequence" in results[0]
    assert "context" in results[1]["error"]["message"]


def test_long_reasons_leave_every_row_of_a_chunk_named_in_an_error_that_grpc_sends():
    faults = {row: f"event is '{row}{'語' * 40}'; expected one of view, purchase" for row in range(32)}
    said = describe_refused(faults, 32)
    assert read_refused(said, 32).keys() == faults.keys()
    assert read_refused(said, 32)[0] == faults[0]
    assert "send it alone" in read_refused(said, 32)[31]
    assert len(said.encode()) * 3 < 8 << 10
