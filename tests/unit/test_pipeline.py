"""Requests to the pipeline in plain Python values: malformed ones are refused before a stage runs."""

import numpy as np
import pytest

from serving.contract.artifacts import StageInfo
from serving.contract.errors import RequestError
from serving.contract.tensors import PAD_ID, Axes, ContextColumn, make_stage_specs
from serving.pipeline import Pipeline, pad_rows

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
