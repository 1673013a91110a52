"""Training rows in files give the workflow that rows in memory give."""

import numpy as np
import pandas as pd
import pytest

from serving.contract.tensors import NULL_ROW, OOV_ROW
from serving.stages.features.encode import Ragged
from serving.stages.features.ids import ItemIndex
from tests.unit.small_shops import keep_few_columns
from training.dataset import load_dataset
from training.features import FeatureSettings
from training.features.build import collect_training_columns, make_event_log
from training.features.columns import make_frame
from training.features.compile import compile_workflow
from training.features.items import Codes
from training.features.rows import describe_column, hold_rows
from training.features.schema import Category, FeatureSchema, Side
from training.features.workflow import fit_workflow


@pytest.mark.parametrize("settings", [FeatureSettings(history_length=8), FeatureSettings(hash_above=20, hash_buckets=11)])
def test_files_give_the_workflow_of_rows_in_memory(settings):
    dataset = keep_few_columns(load_dataset("synthetic:users=80,items=60,events=1000,seed=3,context=1"))
    log, schema = dataset.interactions, FeatureSchema.of(dataset, settings)
    items, categories = ItemIndex(dataset.items["item_id"].to_numpy()), Codes.of(dataset.items["category"])
    events = make_event_log(dataset, log, items, categories, settings)

    def derive(part: slice) -> pd.DataFrame:
        rows = np.arange(len(log))[part]
        return make_frame(collect_training_columns(events, log, rows, schema, dataset.context_columns))

    plans = []
    for most_in_memory in (1_000, 300):
        with hold_rows(1_000, derive, None, most_in_memory) as rows:
            folder, n_files = rows.folder, len(list(rows.folder.glob("*.parquet")))
            plans.append(compile_workflow(fit_workflow(schema.user, rows, settings)))
        assert n_files == (0 if most_in_memory == 1_000 else 4)
        assert not folder.exists()
    here, there = plans
    assert there.categorical == here.categorical
    for ours, theirs in zip(here.continuous, there.continuous, strict=True):
        assert (theirs.fill, theirs.low, theirs.high, theirs.log) == (ours.fill, ours.low, ours.high, ours.log)
        np.testing.assert_allclose([theirs.mean, theirs.std], [ours.mean, ours.std], rtol=1e-5)


def test_a_file_whose_lists_are_all_empty_gives_the_workflow_of_rows_in_memory():
    """As at the beginning of a long log, when no item that was sold had a tag yet."""
    frame = pd.DataFrame({"tags": [[]] * 40 + [["a", "b"], [], ["b"]] * 20, "id": np.arange(100) % 7})
    side = Side((Category("id", "integer", 0),), (), (), (Category("tags", "list", 0),))
    plans = []
    for most_in_memory in (100, 25):
        with hold_rows(100, lambda part: frame[part].reset_index(drop=True), None, most_in_memory) as rows:
            plans.append(compile_workflow(fit_workflow(side, rows, FeatureSettings())))
    asked = {"id": np.arange(7), "tags": Ragged(np.array(["b", "a", None, "c"], object), np.array([0, 4, 4, 4, 4, 4, 4, 4]))}
    for plan in plans:
        encoded = plan(asked)
        assert encoded.lists["tags"].values.tolist() == [3, 4, NULL_ROW, OOV_ROW]
        assert encoded.categorical[:, 0].tolist() == plans[0](asked).categorical[:, 0].tolist()
    assert frame["tags"].map(len).sum() == 60  # the rows themselves are as they were


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ["float64", "object"])
def test_a_column_without_values_is_described_without_a_warning(dtype):
    assert not describe_column(pd.Series([None, None], dtype=dtype)).has_value
