"""Choose the weights that the next generation of continuous training starts from, and keep what it learns for the one after it.

    <live store>/learned/<generation>/   weights (training/models/warm_start.py) of a generation that `export follow` published

They are in the live store, beside the events that they were learned from, so that an erasure finds them.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from live.erase import PROOFS
from live.maintenance import lock
from serving.contract.errors import DependencyError
from serving.live.store import LEARNED
from training.features.build import Features
from training.models.candidates.sequence import SequenceModel
from training.models.rankers.warm_ranker import write_ranker
from training.models.ranking import Ranking
from training.models.warm_start import EARLIER, SERVED, count_generations, write_learned
from training.retrieval.fit import FittedRetriever


@dataclass(frozen=True)
class Learning:
    """The weights that a generation starts from, and the folder that keeps its own.

    start_from: folder of an earlier generation's weights, None to learn from scratch; keep_in: new or empty folder for its own
    generations: length of the chain of generations that learned from one another, this one included
    """

    start_from: Path | None
    keep_in: Path
    generations: int


def plan_learning(live: Path, serving: int, keep_in: Path, scratch_every: int) -> Learning:
    """Return the next generation's start: the weights of the serving one, or none. Raises ArtifactError.

    Weights of any other generation are not used, because they may have learned the events by which both are judged.

    live: folder of the live store; scratch_every: one in so many generations learns from scratch
    """
    learned_folder = live / LEARNED / str(serving)
    generations = count_generations(learned_folder) % scratch_every
    return Learning(learned_folder if generations else None, keep_in, generations + 1)


def measure_erasures(live: Path) -> int:
    """Return the size of the log of erasures in bytes, which grows with each erased user."""
    proofs = live / PROOFS
    return proofs.stat().st_size if proofs.exists() else 0


def keep_learned(learning: Learning, live: Path, serving: int, generation: int, erasures: int) -> str:
    """Keep the weights of a published generation beside those of the serving one, and remove all others.

    erasures: `measure_erasures` before the log was read. Return why nothing was kept, "" if it was.
    """
    folder = live / LEARNED
    try:
        with lock(live, wait=True):  # no erasure runs meanwhile
            if measure_erasures(live) != erasures:
                return "a user was erased meanwhile, from whose events this generation may have learned"
            folder.mkdir(exist_ok=True)
            for path in folder.iterdir():
                if path.name != str(serving):
                    shutil.rmtree(path)
            unfinished = folder / f".{generation}"
            shutil.copytree(learning.keep_in, unfinished)  # the store may be on another file system
            unfinished.rename(folder / str(generation))
    except (OSError, DependencyError) as error:
        return str(error)
    return ""


def keep_weights(
    learning: Learning, features: Features, earlier: SequenceModel | None, retriever: FittedRetriever, ranking: Ranking
) -> None:
    """Write the weights that the next generation may start from.

    earlier: the sequence model fitted before the labels; retriever: the one to serve
    """
    models = {EARLIER: earlier, SERVED: retriever.retriever.sequence}
    write_learned(learning.keep_in, features.items.ids, models, learning.generations)
    if ranking.ranker.learned and "imported" not in ranking.ranker.quality:
        write_ranker(learning.keep_in, features, ranking.ranker, learning.generations)
