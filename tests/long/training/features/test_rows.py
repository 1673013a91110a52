"""Training rows in files give the workflow that rows in memory give."""

import numpy as np
import pandas as pd
import pytest

from serving.stages.features.ids import ItemIndex
from tests.unit.small_shops import keep_few_columns
from training.dataset import load_dataset
from training.features import FeatureSettings
from training.features.build import collect_training_columns, make_event_log
from training.features.columns import make_frame
from training.features.compile import compile_workflow
from training.features.items import Codes
from training.features.rows import describe_column, hold_rows
from training.features.schema import FeatureSchema
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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ["float64", "object"])
def test_a_column_without_values_is_described_without_a_warning(dtype):
    assert not describe_column(pd.Series([None, None], dtype=dtype)).has_value
