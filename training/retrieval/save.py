"""Write the files that `serving/stages/retrieve.py` loads."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from serving.stages.candidate_lists import RetrieveSettings
from serving.stages.features.sequence import NETWORK as SEQUENCE_NETWORK
from serving.stages.features.sequence import make_feeds
from serving.stages.retrieve import HISTORY_TABLE, NETWORK, TABLES_FOLDER
from serving.stages.search.search import INDEX_FILE
from training.features.build import Examples, Features
from training.models.candidates.retriever import Retriever
from training.models.candidates.sequence import SequenceModel
from training.models.parity import Dynamic, Parity, export_network
from training.retrieval.index import SIZES, Choice, Sizes, choose_index

INPUTS = ("history_vectors", "history_weights", "user_embeddings", "user_continuous")
DYNAMIC: Dynamic = {name: {0: "requests"} for name in (*INPUTS, "user_vectors")}
PARITY_SAMPLES = 256


def save_retriever(
    folder: Path,
    retriever: Retriever,
    features: Features,
    available: np.ndarray,
    sample: Examples,
    candidates: int,
    filter_seen: bool = True,
    index_effort: int = 0,
    sizes: Sizes = SIZES,
) -> tuple[dict[str, Any], list[Parity], Choice]:
    """Write the retrieve stage's files, except for `stage.json` and the manifest.

    available: bool [n_items]; sample: real users, for the index's recall; the first PARITY_SAMPLES also for parity
    candidates: number of candidates per request; filter_seen: whether items that a user has seen are left out
    index_effort, sizes: `effort` and `sizes` of `choose_index`, which raises ExportError
    Returns (settings for `stage.json`, parity reports, the chosen index and its trials).
    """
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "item_ids.npy", features.items.ids)
    np.save(folder / "item_vectors.npy", retriever.item_vectors)
    np.save(folder / "available.npy", available)
    retriever.blended_neighbours.save(folder)
    features.seen.save(folder)
    tables = _collect_tables(retriever)
    (folder / TABLES_FOLDER).mkdir(exist_ok=True)
    for name, table in tables.items():
        np.save(folder / TABLES_FOLDER / f"{name}.npy", table)

    positions, queries = np.flatnonzero(available), retriever.compute_user_vectors(sample)
    choice = choose_index(retriever.item_vectors, positions, queries, candidates, index_effort, sizes)
    if choice.index is not None:
        faiss.write_index(choice.index, str(folder / INDEX_FILE))
    settings = RetrieveSettings(tuple(name for name in tables if name != HISTORY_TABLE), filter_seen, choice.kind)
    tensors = retriever.make_network_inputs(Examples(*(values[:PARITY_SAMPLES] for values in sample)))
    inputs = {name: tensor.numpy() for name, tensor in zip(INPUTS, tensors, strict=True)}
    parities = [export_network(retriever.user_network, inputs, "user_vectors", folder / f"{NETWORK}.onnx", DYNAMIC)]
    if retriever.graph is not None:
        settings = replace(settings, graph_width=retriever.graph.history.shape[1])
    if retriever.sequence is not None:
        shape = retriever.sequence.encoder.shape
        settings = replace(
            settings, sequence_width=shape.width, sequence_length=shape.length, sequence_weight=retriever.sequence_weight
        )
        histories = (sample.history_positions[:PARITY_SAMPLES], sample.history_age_days[:PARITY_SAMPLES])
        parities.append(save_sequence(folder, retriever.sequence, *histories))
    return asdict(settings), parities, choice


def save_sequence(folder: Path, model: SequenceModel, history: np.ndarray, age_days: np.ndarray) -> Parity:
    """Write the sequence network as ONNX, and compare the file's answers with the trained network's.

    history, age_days: [N, H] inputs of the comparison, as `make_feeds` takes them
    """
    feeds = make_feeds(model.item_vectors, history, age_days, model.encoder.shape.length)
    dynamic = {name: {0: "requests"} for name in (*feeds, "sequence_vector")}
    return export_network(model.encoder, dict(feeds), "sequence_vector", folder / f"{SEQUENCE_NETWORK}.onnx", dynamic)


def _collect_tables(retriever: Retriever) -> dict[str, np.ndarray]:
    """Return embedding tables, float32 [rows, width], by name: the history's, then one per column of user_categorical."""
    tables = {f"user_{slot}": table.weight.detach().numpy() for slot, table in enumerate(retriever.model.user_tables)}
    return {HISTORY_TABLE: retriever.history_table} | tables
