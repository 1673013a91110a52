"""Names of signals, for messages. Standard library only, because supervisors import it and must stay small."""

from __future__ import annotations

import signal


def name_signal(number: int) -> str:
    """Return a signal's name, such as SIGKILL; real-time signals have only a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
