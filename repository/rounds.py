"""Record beside the models how the last round of continuous training ended, for metrics.

The record of acts (registry.py) has what was published and what was refused; a round that waits or fails is no act.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

ROUND_FILE = ".follow.json"  # tritonserver ignores it
Outcome = Literal["published", "not published", "waits", "failed"]


@dataclass(frozen=True)
class EndedRound:
    """The last round. ended_s: unix seconds; report: what it printed, one line"""

    outcome: Outcome
    ended_s: float
    report: str


def record_round(repo: Path, outcome: Outcome, report: str) -> None:
    """Replace the record of the round before by one rename. Raises OSError."""
    new = repo / f"{ROUND_FILE}.{os.getpid()}"
    try:
        new.write_text(json.dumps(asdict(EndedRound(outcome, time.time(), report))) + "\n")
        os.rename(new, repo / ROUND_FILE)
    finally:
        new.unlink(missing_ok=True)


def read_round(repo: Path) -> EndedRound | None:
    """Return the last round, None if none ever ended. One whose record cannot be read counts as failed."""
    path = repo / ROUND_FILE
    try:
        ended = EndedRound(**json.loads(path.read_text()))
        if ended.outcome not in get_args(Outcome) or not isinstance(ended.ended_s, float):
            raise ValueError(f"outcome {ended.outcome!r}, ended {ended.ended_s!r}")
        return ended
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        return EndedRound("failed", path.stat().st_mtime, f"{path} cannot be read: {error}")
