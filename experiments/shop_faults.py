"""Break generations of the simulated shop: by the feeds of its catalogue, or by the code of a stage."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from experiments import stage_faults
from experiments.stage_faults import BEGUN, Arrays, Serve
from perf.tune.variant import seal_again
from serving.contract.artifacts import find_stage_folder
from training.dataset import Dataset

SOLD_OUT = 0.8  # of the items, those that sell most
KINDS_LEFT, ITEMS_LEFT = 1, 20
BROKEN_MODEL = """
from stage_faults import {fault}, has_begun

published_call = {stage}.__call__


def answer(self, inputs):
    return {fault}(lambda given: published_call(self, given), inputs) if has_begun() else published_call(self, inputs)


{stage}.__call__ = answer
"""

Rules = dict[str, Any]  # that a broken catalogue feed amounts to


def sell_out(dataset: Dataset) -> Rules:
    """Block the items that sell most, as a stock feed that reports them as sold out."""
    return block(rank_by_sales(dataset)[: int(SOLD_OUT * len(dataset.items))])


def lose_kinds(dataset: Dataset) -> Rules:
    """Block the items of all categories but one, as a stale catalogue feed does."""
    kinds = dataset.items["category"]
    left = kinds.drop_duplicates()[:KINDS_LEFT]
    return block(dataset.items["item_id"].to_numpy()[~kinds.isin(left).to_numpy()])


def cut_catalogue_off(dataset: Dataset) -> Rules:
    """Block all but the first items, as a feed that broke off does."""
    return block(dataset.items["item_id"].to_numpy()[ITEMS_LEFT:])


STAGE_FAULTS: Mapping[str, tuple[str, Callable[[Serve, Arrays], Arrays]]] = {
    "ranking takes 10 times as long": ("rank", stage_faults.answer_slowly),
    "retrieval takes 10 times as long": ("retrieve", stage_faults.answer_slowly),
    "ranking fails": ("rank", stage_faults.fail),
    "retrieval fails for a quarter of the requests": ("retrieve", stage_faults.fail_sometimes),
    "the same items for everybody": ("rerank", stage_faults.show_same_items),
    "empty lists": ("rerank", stage_faults.show_nothing),
    "ranks reversed": ("rank", stage_faults.reverse_ranks),
    "users mixed up": ("preprocess", stage_faults.confuse_users),
}
CATALOGUE_FAULTS: Mapping[str, Callable[[Dataset], Rules]] = {
    "best sellers reported as sold out": sell_out,
    "all kinds of items but one missing": lose_kinds,
    "a catalogue that was cut off": cut_catalogue_off,
}
FAULTS = (*STAGE_FAULTS, *CATALOGUE_FAULTS)


def break_stage(repo: Path, generation: int, fault: str) -> None:
    """Put a fault into a published generation of the ensemble layout. It has no effect until `begin_fault`.

    fault: of STAGE_FAULTS. No server may have loaded the generation yet.
    """
    stage, answer = STAGE_FAULTS[fault]
    folder = find_stage_folder(repo, stage, generation)
    shutil.copyfile(Path(stage_faults.__file__), folder / "stage_faults.py")
    model = folder / "model.py"
    published = model.read_text()
    model.unlink()  # published files are read-only
    model.write_text(published + BROKEN_MODEL.format(stage=stage.capitalize(), fault=answer.__name__))
    seal_again(repo, generation, stage)


@contextmanager
def begin_fault(repo: Path, generation: int) -> Iterator[None]:
    """Switch on the fault that `break_stage` put into a generation, until the block ends; do nothing without one."""
    markers = [path.with_name(BEGUN) for path in repo.glob(f"*/{generation}/stage_faults.py")]
    for path in markers:
        path.touch()
    try:
        yield
    finally:
        for path in markers:
            path.unlink()


def block(item_ids: np.ndarray) -> Rules:
    """Return rules by which these items, int64 [N], are never shown."""
    return {"blocked_items": item_ids.tolist()}


def rank_by_sales(dataset: Dataset) -> np.ndarray:
    """Return all item ids, int64 [n_items], those that sell most first."""
    ids = dataset.items["item_id"].to_numpy()
    sales = dataset.interactions["item_id"].value_counts().reindex(ids, fill_value=0).to_numpy()
    return ids[np.argsort(-sales, kind="stable")]
