"""The shop whose rounds of continuous training are tested, and its live events."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
from rich.console import Console

from export.continuous.prequential import make_event_inputs, split_blocks
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import OBSERVE
from serving.stages.live.models import Observe
from tests.repositories import FOLLOWED_EVENTS
from training.dataset import Dataset

EARLY, EVERYTHING = FOLLOWED_EVENTS, 4_500  # events: of the log, and with the live ones
QUIET = Console(quiet=True)


def observe(repo: Path, dataset: Dataset, rows: np.ndarray) -> None:
    with closing(Observe.load(repo / OBSERVE / str(read_pinned_generation(repo)))) as model:
        for part in split_blocks(rows, 500):
            model(make_event_inputs(dataset, part))
