"""The SLO gate: bounds of slo.toml against the last line of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, model_validator

from repository.toml_files import open_toml
from serving.contract.errors import ConfigError

SLO_FILE = Path(__file__).with_name("slo.toml")
OBJECTIVES = (  # what may be bounded: keys of the last line of a run
    *("p50_ms", "p95_ms", "p99_ms", "p99_over_p50", "volley_p99_ms", "error_share", "offered_rate", "achieved_rate"),
    *("clients_1_p50_ms", "peak_rate", "overhead_p50_ms", "throughput_share", "memory_mib"),
)


class Bound(BaseModel):
    """A lower or an upper bound of a number. fused: the bound for the fused layout, where it differs"""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    at_most: float | None = None
    at_least: float | None = None
    why: str = ""
    fused: Bound | None = None

    @model_validator(mode="after")
    def _require_one_side(self) -> Bound:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("give either at_most or at_least")
        return self

    def for_layout(self, layout: str) -> Bound:
        """Return the bound for a layout, "fused" or any other."""
        if self.fused is None or layout != "fused":
            return self
        return self.fused.model_copy(update={"why": self.fused.why or self.why})

    def __str__(self) -> str:
        return f"at most {self.at_most:g}" if self.at_least is None else f"at least {self.at_least:g}"


EQUAL = "answers_equal"
ALL_EQUAL = Bound(at_least=1, why="figures count only where answers equal those in process")


@dataclass(frozen=True)
class Verdict:
    """A bound and a value. None: the run did not measure it, which counts as broken, because silence is no proof."""

    key: str
    bound: Bound
    value: float | None

    @property
    def kept(self) -> bool:
        if self.value is None:
            return False
        at_most, at_least = self.bound.at_most, self.bound.at_least  # one of them
        return (at_most is None or self.value <= at_most) and (at_least is None or self.value >= at_least)


def read_slo(path: Path = SLO_FILE) -> dict[str, Bound]:
    """Return the bounds in a file by key. Raises ConfigError for keys not in OBJECTIVES, and for a file without bounds."""
    with open_toml(path, f"an example is {SLO_FILE}") as document:
        bounds = TypeAdapter(dict[str, Bound]).validate_python(document)
    if not bounds:
        raise ConfigError(f"{path} holds no bounds; a gate without any lets everything through. See the one in {SLO_FILE}.")
    if unknown := sorted(bounds.keys() - set(OBJECTIVES)):
        raise ConfigError(
            f"{path} bounds values that no run measures: {', '.join(unknown)}. Known are: {', '.join(OBJECTIVES)}."
        )
    return bounds


def judge(slo: dict[str, Bound], document: dict[str, Any]) -> list[Verdict]:
    """Return a verdict for each bound, and a broken one if answers differ. document: the last line of a run"""
    verdicts = [Verdict(EQUAL, ALL_EQUAL, 0.0)] if document.get(EQUAL) is False else []
    for key, bound in slo.items():
        bound = bound.for_layout(document.get("layout", ""))
        value = document.get(key)
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
        verdicts.append(Verdict(key, bound, number))
    return verdicts
