"""Triton adapter of `observe` and `upsert`. A published `model.py` is `TritonPythonModel = make_live_model(Observe)`."""

from __future__ import annotations

import time

import numpy as np

from serving.stages.adapter.triton import Arrays, StageModel, check_outputs


def make_live_model(stage_class: type) -> type:
    """Return the `TritonPythonModel` class that serves `stage_class`, either Observe or Upsert."""

    class TritonPythonModel(LiveAdapter):
        stage_types = (stage_class,)

    return TritonPythonModel


class LiveAdapter(StageModel):
    """Answers batches of events or changes. Unlike the stages' requests, they have no lineage, no timings and no fallback."""

    def _find_faults(self, inputs: Arrays, rows: list[int], incomplete: dict[int, str]) -> dict[int, str]:
        """Return a message for each malformed row, and count those of incomplete requests as refused, too, each once."""
        faults = super()._find_faults(inputs, rows, incomplete)
        lacking = {row: text for place, text in incomplete.items() for row in range(sum(rows[:place]), sum(rows[: place + 1]))}
        self.first.stage.count_refused({row: text for row, text in lacking.items() if row not in faults})
        return faults

    def _call(self, inputs: Arrays, is_timed: bool) -> Arrays:
        batch, started_s = len(next(iter(inputs.values()))), time.perf_counter()
        outputs = self.first.stage(inputs)
        check_outputs(self.spec, outputs, batch)
        self.first.metrics.count(np.zeros((batch, 1), np.int64), time.perf_counter() - started_s)
        return outputs
