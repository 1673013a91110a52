"""Requests to the pipeline in plain Python values: malformed ones are refused before a stage runs."""

from contextlib import closing

import numpy as np
import pytest

from serving.contract.artifacts import StageInfo
from serving.contract.errors import RequestError
from serving.contract.tensors import PAD_ID, PROBE_USER_ID, Axes, ContextColumn, make_stage_specs
from serving.pipeline import Pipeline, pad_rows
from serving.stages.features.drift import WINDOW_ROWS
from tests.repositories import small_repository

UNKNOWN, SHOWN = "recommender_unknown_users_total", "recommender_shown_items_share"
WINDOWS = "recommender_drift_windows_total"
COUNTED = {UNKNOWN, SHOWN, WINDOWS}
BATCH = 50
INFO = StageInfo("preprocess", 1, Axes(history=3), (ContextColumn("store", "string"),))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"context": {"shop": ["a", "b"]}}, r"no context column 'shop'; this repository has \['store'\]"),
        ({"context": {"history": [1, 2]}}, "no context column 'history'"),
        ({"context": {"store": ["a"]}}, "store has 1 rows for 2 users"),
        ({"history": [[5]]}, "history has 1 rows for 2 users"),
        ({"exclude": [[5], [], [6]]}, "exclude has 3 rows for 2 users"),
    ],
)
def test_a_request_that_does_not_fit_its_users_is_refused(inputs, message):
    pipeline = Pipeline(INFO, {}, make_stage_specs(INFO.axes, INFO.context))
    with pytest.raises(RequestError, match=message):
        pipeline.recommend([1, 2], **inputs)


def test_rows_are_cut_and_padded():
    assert pad_rows([[1, 2, 3, 4], [], [7]], 3).tolist() == [[1, 2, 3], [PAD_ID] * 3, [7, PAD_ID, PAD_ID]]
    assert pad_rows([[1]], 3).dtype == np.int64


def test_probes_are_left_out_of_what_is_measured_of_requests():
    with closing(Pipeline.load(small_repository())) as pipeline:

        def ask(user_id: int, requests: int) -> dict[str, float]:
            """Ask in batches that a probe is in, and return the measurements that count requests or windows of them."""
            for first in range(0, requests, BATCH):
                pipeline.recommend([PROBE_USER_ID, *[user_id] * min(BATCH, requests - first)])
            measured = [m for stage in ("preprocess", "rank", "rerank") for m in pipeline.stages[stage].list_measurements()]
            return {m.labels.get("watched", m.name): m.value for m in measured if m.name in COUNTED}

        unknown = 10**12
        assert ask(PROBE_USER_ID, WINDOW_ROWS) == {UNKNOWN: 0, "features": 0, "best_items": 0}
        assert ask(unknown, WINDOW_ROWS - 1) == {UNKNOWN: WINDOW_ROWS - 1, "features": 0, "best_items": 0}
        full = ask(unknown, 1)
        assert full.pop(SHOWN) > 0
        assert full == {UNKNOWN: WINDOW_ROWS, "features": 1, "best_items": 1}


@pytest.mark.parametrize("choice", ["category", "among"])
def test_the_best_items_of_requests_that_narrow_the_choice_are_not_watched_for_drift(choice):
    with closing(Pipeline.load(small_repository())) as pipeline:
        stages, whole = pipeline.stages, {"user_id": np.full((BATCH, 1), 10**12)}
        spec = {tensor.name: tensor for tensor in pipeline.specs["retrieve"].inputs}[choice]
        narrow = whole | {choice: np.full((BATCH, *spec.dims), b"unheard of" if choice == "category" else 3, spec.numpy_dtype)}

        def ask(inputs: dict[str, np.ndarray], batches: int) -> dict[str, float]:
            for _ in range(batches):
                assert (pipeline(inputs)["degraded"] == 0).all()
            measured = [m for stage in ("preprocess", "rank") for m in stages[stage].list_measurements()]
            return {m.labels["watched"]: m.value for m in measured if m.name == WINDOWS}

        full = -(-WINDOW_ROWS // BATCH)
        assert ask(narrow, full) == {"features": 1, "best_items": 0}
        assert ask(whole, full)["best_items"] == 1
