"""Start the helpers of a server again that are gone together with their own supervisors, as after `pkill -9 python`."""

from __future__ import annotations

from pathlib import Path

from server import live_helpers, updaters
from server.state import ServerState
from serving.contract.errors import ServerError


class HelperWatch:
    """Looks at the helpers of the live store and at the updater of the tables, for the server's supervisor."""

    def __init__(self, state: ServerState, run_dir: Path) -> None:
        self._state, self._run_dir = state, run_dir
        self._missing: set[str] = set()

    def look(self) -> str:
        """Start what was missing at this look and at the one before. Return what was done, "" for nothing.

        One look does not suffice, because a server that moves to another generation exchanges its helpers.
        """
        before, self._missing = self._missing, self._list_missing()
        gone = before & self._missing
        if not gone:
            return ""
        try:
            live_helpers.follow(self._state, self._run_dir)
            updaters.follow(self._state, self._run_dir)
        except ServerError as error:
            return str(error)
        return f"gone together with their supervisors, and started again: {', '.join(sorted(gone))}"

    def _list_missing(self) -> set[str]:
        missing = live_helpers.list_missing(self._state)
        return missing | {"updater"} if updaters.is_missing(self._state) else missing
