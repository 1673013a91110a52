"""A measurement: one named value that a process reports on the server's metrics port or in a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

COUNTER: Final = "counter"
GAUGE: Final = "gauge"
Kind = Literal["counter", "gauge"]


@dataclass(frozen=True)
class Measurement:
    """One value at the time of the report. A counter never falls while its process lives.

    labels: distinguish values of the same name
    """

    name: str
    description: str
    kind: Kind
    labels: dict[str, str]
    value: float
