"""A measurement: one named value that a process reports, whatever publishes it (the server's metrics port, or a report)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

COUNTER: Final = "counter"
GAUGE: Final = "gauge"


@dataclass(frozen=True)
class Measurement:
    """One value now. Counters only grow while the process lives; `labels` tell values of one name apart."""

    name: str
    description: str
    kind: Literal["counter", "gauge"]
    labels: dict[str, str]
    value: float
