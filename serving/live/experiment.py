"""The experiment that runs on a shop: two generations, and which users meet the challenger.

    <live store>/experiment.json     the only file; replaced by one rename, so that every process reads it whole

A user's place depends on the user and the experiment's name alone, so it is the same in every gateway and after a restart.
Users whose place is below `share` are enrolled: a larger share keeps all who were enrolled before, a smaller one adds nobody.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

from serving.contract.errors import ArtifactError

EXPERIMENT_FILE = "experiment.json"
Mode = Literal["ab", "shadow", "interleave"]
State = Literal["running", "stopped", "rolled back", "promoted"]
# Arms, as the exposure log names them. "interleaved": both generations in one answer; "shadow": asked and never shown.
CHAMPION_ARM, CHALLENGER_ARM, INTERLEAVED_ARM, SHADOW_ARM = "champion", "challenger", "interleaved", "shadow"
ARM_OF_MODE = {"ab": CHALLENGER_ARM, "shadow": CHAMPION_ARM, "interleave": INTERLEAVED_ARM}


def hash_share(text: str) -> float:
    """Return a number in [0, 1] that depends on the text alone, uniform over texts."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64


@dataclass(frozen=True)
class Experiment:
    """One version of an experiment's settings.

    name: also the seed of the assignment; champion, challenger: generations; share: of users, 0 … 1
    mode: enrolled users are answered by the challenger ("ab"), by both ("interleave"), or by the champion while the challenger
        is asked as well ("shadow")
    reason: why the state is what it is; version: counts the changes; started_ms, changed_ms: unix milliseconds
    promotes: whether the challenger takes over by itself once it is better beyond doubt
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

    def __post_init__(self) -> None:
        """Raise ArtifactError for a value that no experiment has."""
        wrong = {
            "name": not self.name or not isinstance(self.name, str),
            "share": not 0 <= self.share <= 1,
            "mode": self.mode not in get_args(Mode),
            "state": self.state not in get_args(State),
            "challenger": self.challenger == self.champion,
        }
        for key, is_wrong in wrong.items():
            if is_wrong:
                raise ArtifactError(
                    f"The experiment's {key} is {getattr(self, key)!r}; expected a name, a share of 0 to 1, a mode of "
                    f"{get_args(Mode)}, a state of {get_args(State)} and two generations. Start it again."
                )

    @property
    def runs(self) -> bool:
        return self.state == "running"

    def enrols(self, user_id: int) -> bool:
        """Return whether a user meets the challenger. user_id: on the wire; of a session, its id there."""
        return self.runs and hash_share(f"{self.name}/{user_id}") < self.share

    def arm_of(self, user_id: int) -> str:
        """Return the arm of a user's answers; "" when no experiment runs."""
        if not self.runs:
            return ""
        return ARM_OF_MODE[self.mode] if self.enrols(user_id) else CHAMPION_ARM

    def assignment_of(self, arm: str) -> float:
        """Return the probability with which a user meets an arm: the share of the users whose hash gives them to it."""
        if arm == CHAMPION_ARM:
            return 1.0 if self.mode == "shadow" else 1.0 - self.share
        return self.share

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def read_experiment(folder: Path) -> Experiment | None:
    """Return the experiment of a live store, None where none was ever started. Raises ArtifactError."""
    path = folder / EXPERIMENT_FILE
    try:
        stated, known = json.loads(path.read_text()), {each.name for each in fields(Experiment)}
        return Experiment(**{name: value for name, value in stated.items() if name in known})  # a newer version may know more
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}. Stop the experiment and start it again.") from error


@dataclass
class FollowedExperiment:
    """Follows a live store's experiment. folder: of the store."""

    folder: Path
    _stamp: tuple[int, int] = field(default=(0, 0), init=False)
    _current: Experiment | None = field(default=None, init=False)

    def current(self) -> Experiment | None:
        """Return the experiment as it is now, at the cost of one `stat`.

        Raises ArtifactError once for a file that cannot be read; from then on there is no experiment until it changes.
        """
        try:
            facts = (self.folder / EXPERIMENT_FILE).stat()
        except FileNotFoundError:
            return None
        stamp = (facts.st_ino, facts.st_mtime_ns)
        if stamp != self._stamp:
            self._stamp, self._current = stamp, None
            self._current = read_experiment(self.folder)
        return self._current
