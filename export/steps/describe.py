"""Describe what an export used and learned: for the manifest, and in lines for people."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from export.settings import Settings
from training.dataset import Dataset
from training.models.rankers.train_ranker import Ranker
from training.models.ranking import RankingSettings
from training.retrieval.choose import Choices

LIBRARIES = ("numpy", "onnxruntime", "faiss-cpu", "nvtabular", "torch", "onnx", "nvidia-pytriton")


def describe_sources(choices: Choices) -> str:
    """Return the candidate sources for one line of output."""
    optional = {"sequence model": choices.sequence, "graph": choices.graph}
    sources = [
        f"{name} with weight {choice.chosen:g}"
        for name, choice in (optional | {"repeats": choices.repeats}).items()
        if choice.chosen
    ]
    not_tried = [f"{name} not tried: {choice.not_tried}" for name, choice in optional.items() if choice.not_tried]
    return "; ".join([", ".join(["item-item", "two towers", *sources]), *not_tried])


def describe_ranker(ranker: Ranker, choices: RankingSettings) -> str:
    """Return a description of a ranker for one line of output."""
    if not ranker.learned:
        return (
            "learned nothing, because none of the requests for training, or none for validation, retrieved an item that its "
            "user took: items keep retrieval's order"
        )
    text = "NDCG@10 {ndcg_at_10:.4f}, Recall@20 {recall_at_20:.4f} among the retrieved items of validation requests".format(
        **ranker.quality
    )
    teachers = f"; more teachers not tried: {ranker.no_teachers}" if ranker.no_teachers else ""
    if ranker.compression == choices.compression:
        return f"{text}, {ranker.compression}{teachers}"
    served_name = "the distilled network" if ranker.compression == "distilled" else "the DLRM itself"
    return f"{text}; made smaller ({choices.compression}), it keeps too little, so {served_name} is served{teachers}"


def describe_export(dataset: Dataset, settings: Settings, reports: dict[str, Any]) -> dict[str, Any]:
    """Return what the manifest says of an export: its data, settings, versions of libraries, and reports."""
    return {
        "dataset": dataset.description.model_dump(mode="json"),
        "log": describe_log(dataset),
        "settings": settings.model_dump(mode="json"),
        "versions": {name: metadata.version(name) for name in LIBRARIES},
        "reports": reports,
    }


def describe_log(dataset: Dataset) -> dict[str, Any]:
    """Return how many events a log has, and the days of its first and last one, UTC."""
    times_s = dataset.interactions["timestamp"].to_numpy()
    days = (datetime.fromtimestamp(int(time_s), UTC).date().isoformat() for time_s in (times_s.min(), times_s.max()))
    return {"events": len(times_s), **dict(zip(("first", "last"), days, strict=True))}
