"""Keep the helpers that a server needs: start those that are missing, and end those of a challenger that is no longer served.

Helpers are missing if they were killed together with their own supervisors, for lack of memory for instance, or if a challenger
was loaded.
"""

from __future__ import annotations

import time
from pathlib import Path

from server.helpers import generation_helpers
from server.state import ServerState, make_state_path, read_state
from serving.contract.errors import RecommenderError

LEFT_OVER = "one that is no longer needed"
MOVE_S = 20.0  # longer than a server that moves to another generation takes to exchange its helpers


class HelperWatch:
    """Looks at the helpers of the live store and at the updater of the tables, for the server's supervisor."""

    def __init__(self, state: ServerState, run_dir: Path) -> None:
        self._state, self._run_dir = state, run_dir
        self._since_s: dict[str, float] = {}

    def look(self) -> str:
        """Start and end helpers once one was missing, or left over, for MOVE_S. Return what was done, "" for nothing."""
        now_s = time.monotonic()
        missing = generation_helpers.list_missing(self._state)
        if generation_helpers.is_one_left_over(self._state):
            missing.add(LEFT_OVER)
        self._since_s = {name: self._since_s.get(name, now_s) for name in missing}
        overdue_names = sorted(name for name, since_s in self._since_s.items() if now_s - since_s >= MOVE_S)
        if not overdue_names or self._is_over():
            return ""
        started = ", ".join(name for name in overdue_names if name != LEFT_OVER)
        action = f"helpers that were missing are started: {started}" if started else f"a helper is ended: {LEFT_OVER}"
        try:
            generation_helpers.follow(self._state, self._run_dir, waits=False)  # the server must be looked at meanwhile
        except (RecommenderError, OSError) as error:
            return f"{action}; {error}"
        return action

    def _is_over(self) -> bool:
        """Return whether the server was stopped or moved since this watch began: then others keep its helpers."""
        now = read_state(make_state_path(self._run_dir, self._state.ports.grpc))
        return now is None or (now.tag, now.generation) != (self._state.tag, self._state.generation)
