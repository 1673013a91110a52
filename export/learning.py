"""Choose what the next generation of continuous training goes on from, and keep what it learns for the one after it.

    <live store>/learned/<generation>/   weights (training/models/warm_start.py) of a generation that `export follow` published

They are beside the events that they come from, so that an erasure finds them.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from live.erase import PROOFS
from live.maintenance import lock
from serving.live.store import LEARNED
from training.models.warm_start import count_generations


@dataclass(frozen=True)
class Learning:
    """start_from: what an earlier generation learned, None to learn from scratch; keep_in: an empty or new folder for what this
    one learns; generations: how many have learned from one another then, this one included
    """

    start_from: Path | None
    keep_in: Path
    generations: int


def plan_learning(live: Path, serving: int, keep_in: Path, scratch_every: int) -> Learning:
    """Return whether the next generation goes on from the serving one, or learns from scratch. Raises ArtifactError.

    Weights of any other generation are of no use: they may know the events by which both are judged.

    live: folder of the live store; scratch_every: of so many generations one learns from scratch
    """
    kept = live / LEARNED / str(serving)
    generations = count_generations(kept) % scratch_every
    return Learning(kept if generations else None, keep_in, generations + 1)


def measure_erasures(live: Path) -> int:
    """Return a number that grows with each erased user."""
    proofs = live / PROOFS
    return proofs.stat().st_size if proofs.exists() else 0


def keep_learned(learning: Learning, live: Path, serving: int, generation: int, erasures: int) -> str:
    """Keep what a published generation learned, and what the serving one did. Return what prevented it, "" for nothing.

    erasures: `measure_erasures` before the log was read
    """
    folder = live / LEARNED
    try:
        with lock(live, wait=True):  # no erasure runs meanwhile
            if measure_erasures(live) != erasures:
                return "a user was erased meanwhile"
            folder.mkdir(exist_ok=True)
            for path in folder.iterdir():
                if path.name != str(serving):
                    shutil.rmtree(path)
            unfinished = folder / f".{generation}"
            shutil.copytree(learning.keep_in, unfinished)  # the store may be on another file system
            unfinished.rename(folder / str(generation))
    except OSError as error:
        return str(error)
    return ""
