"""Which stages of a server are ready, as every caller may ask: the list of its models is for holders of its key."""

from __future__ import annotations

from collections.abc import Mapping

from clients.models import Health, ModelState
from serving.contract.tensors import ENSEMBLE


def steps_of(config) -> list[tuple[str, str]]:
    """Return (name, version) of each model that `recommend` runs, by its configuration; version "" lets the server choose."""
    steps = config.ensemble_scheduling.step
    return [(step.model_name, str(step.model_version) if step.model_version > 0 else "") for step in steps]


def health_of(version: str, ready: bool, steps: Mapping[tuple[str, str], bool]) -> Health:
    """version: of `recommend`; steps: (name, version) -> ready."""
    states = {**steps, (ENSEMBLE, version): ready}
    models = [ModelState(name, number, "READY" if good else "UNAVAILABLE") for (name, number), good in states.items()]
    return Health(ready and all(steps.values()), tuple(models))
