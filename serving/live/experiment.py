"""Describe the experiment that runs on a shop: two generations, and which users are assigned to the challenger.

    <live store>/experiment.json     the only file; replaced by one rename, so that every process reads it whole

A hash of the experiment's name and the user gives each user a number in 0 … 1, the same in every gateway and after a restart.
Users whose number is below `share` are enrolled: a larger share keeps all who are enrolled, and a smaller one adds nobody.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

from serving.contract.errors import ArtifactError

EXPERIMENT_FILE = "experiment.json"
UNREADABLE = (-1, -1)  # in place of inode and time of a file whose folder cannot be entered
DAY_MS = 86_400_000
Mode = Literal["ab", "shadow", "interleave"]
State = Literal["running", "stopped", "rolled back", "promoted"]
# Arms, as the exposure log names them. "interleaved": both generations in one answer; "shadow": requested but never shown.
CHAMPION_ARM, CHALLENGER_ARM, INTERLEAVED_ARM, SHADOW_ARM = "champion", "challenger", "interleaved", "shadow"
ARM_OF_MODE = {"ab": CHALLENGER_ARM, "shadow": CHAMPION_ARM, "interleave": INTERLEAVED_ARM}


def hash_share(text: str) -> float:
    """Return a number in 0 … 1 that depends only on the text, uniform over texts."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64


@dataclass(frozen=True)
class Experiment:
    """One version of an experiment's settings.

    name: also the seed of the assignment; champion, challenger: generations; share: share of enrolled users, 0 … 1
    mode: enrolled users get the challenger's answer ("ab"), one of both generations ("interleave"), or the champion's, while
        the challenger answers too and is not shown ("shadow")
    reason: why it has this state; version: number of changes; started_ms, changed_ms: unix milliseconds
    promotes: whether the challenger takes over automatically once it is significantly better
    days: since the last change, after which a challenger that knows newer events takes over if it is not worse, and the
        experiment ends otherwise; 0: it has no end of its own
    """

    name: str
    champion: int
    challenger: int
    share: float
    mode: Mode = "ab"
    state: State = "running"
    reason: str = ""
    version: int = 1
    started_ms: int = 0
    changed_ms: int = 0
    promotes: bool = False
    days: float = 0.0

    def __post_init__(self) -> None:
        """Raise ArtifactError for a value that no experiment has."""
        # Gateways hash the name, logs and metrics print it: bytes of another encoding in a command line are no text.
        has_name = isinstance(self.name, str) and self.name and self.name.isprintable()
        rules = {
            "name": (has_name, "a printable text in UTF-8"),
            "share": (0 <= self.share <= 1, "0 to 1"),
            "mode": (self.mode in get_args(Mode), f"one of {', '.join(get_args(Mode))}"),
            "state": (self.state in get_args(State), f"one of {', '.join(get_args(State))}"),
            "challenger": (self.challenger != self.champion, "another generation than the champion"),
            "days": (self.days >= 0, "0 or more"),
        }
        for key, (is_right, expected) in rules.items():
            if not is_right:
                raise ArtifactError(f"The experiment's {key} is {getattr(self, key)!r}; expected {expected}.")

    @property
    def runs(self) -> bool:
        return self.state == "running"

    def is_over(self, now_ms: int) -> bool:
        """Return whether its days have passed."""
        return bool(self.days) and now_ms - self.changed_ms >= self.days * DAY_MS

    def enrols(self, user_id: int) -> bool:
        """Return whether a user is enrolled. user_id: int64 id on the wire, of a user or of a session"""
        return self.runs and hash_share(f"{self.name}/{user_id}") < self.share

    def find_arm(self, user_id: int) -> str:
        """Return the arm of a user's answers; "" when no experiment runs."""
        if not self.runs:
            return ""
        return ARM_OF_MODE[self.mode] if self.enrols(user_id) else CHAMPION_ARM

    def find_assignment(self, arm: str) -> float:
        """Return the probability with which a user is assigned to an arm."""
        if arm == CHAMPION_ARM:
            return 1.0 if self.mode == "shadow" else 1.0 - self.share
        return self.share

    def write_text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def read_experiment(folder: Path) -> Experiment | None:
    """Return the experiment of a live store; None if none was ever started. Raises ArtifactError."""
    path = folder / EXPERIMENT_FILE
    try:
        record, names = json.loads(path.read_text()), {each.name for each in fields(Experiment)}
        return Experiment(**{name: value for name, value in record.items() if name in names})  # newer versions may add keys
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError, ArtifactError) as error:
        reason = str(error).rstrip(".")
        raise ArtifactError(f"{path} cannot be read: {reason}. Move the file away, and start the experiment again.") from error


@dataclass
class FollowedExperiment:
    """Follows the experiment of the live store in `folder`."""

    folder: Path
    _stamp: tuple[int, int] = field(default=(0, 0), init=False)
    _current: Experiment | None = field(default=None, init=False)

    def read_current(self) -> Experiment | None:
        """Return the experiment as it is now, at the cost of one `stat`.

        Raises ArtifactError once for a file that cannot be read; from then on there is no experiment until it changes.
        """
        try:
            facts = (self.folder / EXPERIMENT_FILE).stat()
        except FileNotFoundError:
            return None
        except OSError:  # a folder that may not be entered; reading says so, once
            stamp = UNREADABLE
        else:
            stamp = (facts.st_ino, facts.st_mtime_ns)
        if stamp != self._stamp:
            self._stamp, self._current = stamp, None
            self._current = read_experiment(self.folder)
        return self._current
