"""Move a server to the generation that another process has pinned its repository to (`server start --follow-pin`).

For servers whose repository is published to from elsewhere, such as pods of Kubernetes beside a CronJob that trains. The move
is added to the record of the repository if that can be written, and nothing else is written there. Each server waits for a
random part of SPREAD_S, so that not all of them move at once.
"""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

from repository.experiments import follow_experiment
from repository.file_stamps import Stamp, read_stamp
from repository.lock import hold_publication_lock
from server.control import activate
from server.generations.activation import PUBLICATION_TIMEOUT_S
from server.generations.integrity import is_intact
from server.start.lock import hold_start_lock
from server.state import ServerState
from serving.contract.errors import ArtifactError, ConfigError, RecommenderError, ServerError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE

SPREAD_S = 60.0
RETRY_S = 600.0  # after a move that failed


class PinFollower:
    """Follows the pin of one server's repository. run_dir: the server's run folder"""

    def __init__(self, state: ServerState, run_dir: Path) -> None:
        self._state, self._run_dir = state, run_dir
        self._experiment = follow_experiment(state.repo)
        self._noticed: Stamp | None = None  # of the pin that the server is to follow from `_move_at_s` on
        self._followed: Stamp | None = None
        self._move_at_s = 0.0

    def look(self) -> str:
        """Move the server to the pinned generation. Return what was done, "" for nothing.

        Not while an experiment runs, because its champion must stay. A generation that is damaged or does not load leaves the
        server where it is, and is tried again after RETRY_S.
        """
        if not self._state.settings.get("follow_pin"):
            return ""
        stamp = read_stamp(self._state.repo / ENSEMBLE / "config.pbtxt")
        if stamp is None or stamp == self._followed:
            return ""
        if stamp != self._noticed:
            self._noticed, self._move_at_s = stamp, time.monotonic() + random.uniform(0, SPREAD_S)
        if time.monotonic() < self._move_at_s or self._is_experimenting():
            return ""
        self._move_at_s = time.monotonic() + RETRY_S
        try:
            pinned = read_pinned_generation(self._state.repo)
            action = self._move(pinned) if pinned != self._state.generation else ""
        except (RecommenderError, OSError) as error:
            return f"the server stays at generation {self._state.generation}, and does not follow the pin: {error}"
        self._followed = stamp
        return action

    def _move(self, pinned: int) -> str:
        repo = self._state.repo
        if not is_intact(repo, pinned):
            raise ArtifactError(f"Files of generation {pinned} in {repo} are not as they were published. Pin another one.")
        with contextlib.ExitStack() as stack:
            stack.enter_context(hold_start_lock(self._run_dir, self._state.ports.grpc))
            with contextlib.suppress(ConfigError):  # read-only: no experiment can begin here either
                stack.enter_context(hold_publication_lock(repo, PUBLICATION_TIMEOUT_S))
            if self._is_experimenting():
                raise ServerError("an experiment has begun.")
            if (now := read_pinned_generation(repo)) != pinned:  # pinned back while this waited for the lock
                raise ServerError(f"generation {now} is pinned by now.")
            before = activate(self._state, pinned, self._run_dir, writes=False)
        return f"generation {pinned} is pinned: moved to it from {before}"

    def _is_experimenting(self) -> bool:
        experiment = self._experiment.read_current() if self._experiment else None
        return experiment is not None and experiment.runs
