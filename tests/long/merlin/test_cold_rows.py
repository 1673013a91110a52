"""Tables of two widths in the merlin profile: whole rows behind hps, the two widths behind our own levels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from export.nvidia.hps import name_table
from export.nvidia.pipeline import MerlinPipeline
from export.nvidia.publish import publish_merlin
from export.settings import RankerChoice, Settings
from repository.recorded import RECORDED_FILE, read_recorded
from serving.contract.tensors import ENSEMBLE
from serving.pipeline import Pipeline
from serving.stages.rank import Rank
from serving.tables.formats.sparse_folder import read_sparse_folder
from tests.long.merlin.conftest import source_of
from tests.unit.small_shops import CONTEXT, export, shop
from training.models.cold_rows import ColdRows


@pytest.fixture(scope="module")
def cold(tmp_path_factory) -> Path:
    """A repository of the cpu profile with narrow rows of users and items."""
    folder = tmp_path_factory.mktemp("cold")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankerChoice, "cold", ColdRows(3, 0.4, least_rows=10))
        return export(folder, shop(folder / "data", users=12, items=30, events=60, more=CONTEXT))


@pytest.mark.parametrize("triton", ["24.03", "modern"])
def test_answers_are_those_of_the_cpu_profile(cold, tmp_path, triton):
    repository = tmp_path / "merlin"
    publish_merlin(source_of(cold), repository, Settings(merlin={"triton": triton}), report=lambda _: None)
    inputs = read_recorded(cold / ENSEMBLE / "1" / RECORDED_FILE).inputs
    pipeline = Pipeline.load(cold, as_exported=True)
    expected = pipeline(inputs)
    pipeline.close()
    got = MerlinPipeline(repository, 1, "/models")(inputs)
    np.testing.assert_array_equal(got["item_ids"], expected["item_ids"])
    np.testing.assert_allclose(got["scores"], expected["scores"], atol=1e-4)


def test_hps_gets_every_row_as_wide_as_the_network_reads_it(cold, tmp_path):
    source, repository = source_of(cold), tmp_path / "merlin"
    publish_merlin(source, repository, Settings(merlin={"triton": "24.03"}), report=lambda _: None)
    tables, rank = source.load_tables(), Rank.load(cold / "rank" / "1", as_exported=True)
    assert rank.rows.settings.first_cold
    for name, rows in tables.items():
        (served,) = rank.rows.widths.gather(rank.tables, ((name,), np.arange(len(rows))[:, None])).values
        np.testing.assert_array_equal(served[:, 0], rows)
    rank.close()
    rows = np.concatenate(list(tables.values()))
    found = read_sparse_folder(repository / "rank_embeddings" / "1" / f"{name_table(tables)}.model", rows.shape[1])
    np.testing.assert_array_equal(found.vectors[np.argsort(found.keys)], rows)
