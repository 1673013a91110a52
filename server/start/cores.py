"""Count the cores that a server may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

from server.start.memory import CGROUP


def count_cores(cgroup: Path = CGROUP) -> int:
    """Return the cores of this process, or its container's share of them when that is less. A part of a core counts as one."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except OSError:  # the root group, or cgroup version 1
        return cores
    return cores if quota == "max" else min(cores, math.ceil(int(quota) / int(period)))
