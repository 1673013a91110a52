"""Folders of rank and rerank that disagree with themselves are refused when they are loaded."""

import json
import shutil
import threading

import numpy as np
import pytest

from serving.contract.errors import ArtifactError
from serving.stages.live.counts.sales import LEARNED_SALES
from serving.stages.rank import EmbeddingRows, Rank
from serving.stages.rerank import Rerank
from serving.stages.rules.config import ITEMS_FILE
from serving.tables.store import table as table_module
from serving.tables.store.tables import EmbeddingTables
from tests.interrupting import called_on_return


def rewritten(folder, name, tmp_path, **changes):
    """A copy of a stage folder with settings of stage.json replaced."""
    copy = tmp_path / name
    shutil.copytree(folder / name, copy)
    stage = json.loads((copy / "stage.json").read_text())
    stage["settings"].update(changes)
    stage["settings"] = {key: value for key, value in stage["settings"].items() if value is not None}
    (copy / "stage.json").write_text(json.dumps(stage))
    return copy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blend": None}, "has other settings than rank expects"),
        ({"user_tables": ["user_0", "user_99"]}, r"lacks the tables \['user_99'\]"),
        ({"user_tables": ["user_0"]}, "names 1 user and"),
    ],
)
def test_a_rank_folder_that_disagrees_with_itself_is_refused(trained, tmp_path, changes, message):
    with pytest.raises(ArtifactError, match=message):
        Rank.load(rewritten(trained.folder, "rank", tmp_path, **changes))


def test_item_arrays_of_another_catalogue_are_refused(trained, tmp_path):
    rank, rerank = (rewritten(trained.folder, name, tmp_path) for name in ("rank", "rerank"))
    numbers = np.load(rank / "item_numbers.npy")
    np.save(rank / "item_numbers.npy", np.zeros((3, 2), np.float32))
    with pytest.raises(ArtifactError, match=r"items need .* rows, found"):
        Rank.load(rank)
    np.save(rank / "item_numbers.npy", np.pad(numbers, ((0, 0), (0, 1))))
    with pytest.raises(ArtifactError, match=r"rank\.onnx takes \d+ numbers per candidate; expected"):
        Rank.load(rank)
    np.save(rerank / "item_vectors.npy", np.zeros((3, 2), np.float32))
    with pytest.raises(ArtifactError, match=r"item_vectors\.npy holds float32 \[3, 2\]; expected float32 \[81, any\]"):
        Rerank.load(rerank)


def test_rules_of_another_catalogue_are_refused(trained, tmp_path):
    rerank = rewritten(trained.folder, "rerank", tmp_path)
    np.save(rerank / ITEMS_FILE, np.load(rerank / ITEMS_FILE)[1:])
    with pytest.raises(ArtifactError, match="has 80 items, the rules 79"):
        Rerank.load(rerank)


@pytest.mark.parametrize("beyond", [-1, 10**6])
def test_rows_that_no_table_has_are_refused(trained, tmp_path, beyond):
    """One more than the last row is one too many."""
    rank = rewritten(trained.folder, "rank", tmp_path)
    rows = np.load(rank / "item_rows.npy")
    name = trained.rank.inputs.settings.item_tables[-1]
    n_rows = len(EmbeddingTables.load(rank / "tables").tables[name])
    rows[-2, -1] = n_rows - 1
    np.save(rank / "item_rows.npy", rows)
    Rank.load(rank).close()
    rows[-2, -1] = min(beyond, n_rows)
    np.save(rank / "item_rows.npy", rows)
    said = rf"item_rows\.npy, of table {name}, holds values from .* to .*; expected 0 to {n_rows - 1}\."
    with pytest.raises(ArtifactError, match=said):
        Rank.load(rank)


@pytest.fixture
def shared(tmp_path, monkeypatch):
    (tmp_path / "shared").mkdir()
    monkeypatch.setattr(table_module, "SHARED_MEMORY", str(tmp_path / "shared"))
    return tmp_path / "shared"


def test_whatever_stops_a_load_the_tables_are_closed(trained, tmp_path, shared):
    def fail():
        raise MemoryError

    folder, before = rewritten(trained.folder, "rank", tmp_path), set(threading.enumerate())
    with called_on_return(fail, EmbeddingRows.__init__), pytest.raises(MemoryError):
        Rank.load(folder)
    np.save(folder / f"{LEARNED_SALES}.npy", np.zeros(3))
    with pytest.raises(ArtifactError, match=r"learned_sales\.npy holds float64"):
        Rank.load(folder)
    assert set(threading.enumerate()) <= before
    assert list(shared.iterdir()) == []


def test_a_rerank_folder_without_its_settings_is_refused(trained, tmp_path):
    with pytest.raises(ArtifactError, match="has other settings than rerank expects"):
        Rerank.load(rewritten(trained.folder, "rerank", tmp_path, list_length=None))
