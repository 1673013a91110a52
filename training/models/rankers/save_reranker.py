"""Write the files of `serving/stages/rerank.py`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np

from serving.stages.features.ids import ItemIndex
from serving.stages.rerank import NETWORK, RerankSettings
from training.models.parity import Parity
from training.models.rankers.reranker import Lists, Reranker
from training.models.rankers.reranker_graph import export_reranker


def save_reranker(
    folder: Path, reranker: Reranker, index: ItemIndex, item_vectors: np.ndarray, sample: Lists
) -> tuple[dict, Parity]:
    """Write the rerank stage without rules, `stage.json` and manifest. Return its settings and the parity report."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "item_ids.npy", index.ids)
    np.save(folder / "item_vectors.npy", item_vectors)
    inputs = {
        "features": sample.features,
        "vectors": item_vectors[sample.positions],
        "valid": sample.valid.astype(np.float32),
    }
    parity = export_reranker(reranker.network, inputs, folder / f"{NETWORK}.onnx")
    return asdict(RerankSettings(reranker.list_length, reranker.trust)), parity
