"""What the SSD alone makes of the rank stage: its rows from RAM, then as many raw reads as another case had missing rows.

Reads by native threads, with nothing around them, when the rest of the stage is done: tiers over this device hardly take less.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from experiments.tiers.native_device import NativeDevice
from perf.load.workload import Arrays
from serving.stages.rank import Rank

BLOCKS = 1 << 20  # random ones of so many


@dataclass
class WithRawReads:
    """A rank stage whose calls end with raw reads. misses: how many each coming call has; none where they are used up."""

    rank: Rank
    device: NativeDevice
    misses: deque[int] = field(default_factory=deque)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def faults(self, inputs: Arrays) -> dict[int, str]:
        return self.rank.faults(inputs)

    def __call__(self, inputs: Arrays) -> Arrays:
        outputs = self.rank(inputs)
        if self.misses and (count := self.misses.popleft()):
            self.device.read(self.rng.integers(0, BLOCKS, count))
        return outputs
