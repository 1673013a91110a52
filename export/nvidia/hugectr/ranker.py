"""The rank stage's model from HugeCTR: called in place of training when `[hugectr] model` names a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from export.nvidia.hugectr.importing import import_dlrm
from export.nvidia.hugectr.inputs import list_inputs
from training.features.build import Features
from training.models.rankers.ranking_data import Requests
from training.models.rankers.train_ranker import Ranker, RankerSettings, Report, describe_quality, find_best_blend
from training.models.ranking import TrainRanker


def import_ranker(folder: Path, name: str, features: Features) -> TrainRanker:
    """Import the model, and return a fitter that fits only the weight of the retrieval score in its logits.

    Raises what `import_dlrm` raises.
    """
    lists = frozenset(f"item.{name}" for name in features.item_arrays.lists)
    model = import_dlrm(folder, name, list_inputs(features), lists)

    def fit(
        teaching: Sequence[Requests],
        validation: Requests,
        tables: tuple[dict[str, int], dict[str, int]],
        settings: RankerSettings,
        seed: int = 0,
        report: Report = print,
        without_events: Sequence[Requests] = (),
    ) -> Ranker:
        blend, quality = find_best_blend(model, validation, settings.blends)
        report(f"ranker: imported from {folder}, validation {describe_quality(quality)}, blend {blend}")
        return Ranker(model, blend, quality | {"imported": 1.0})

    return fit
