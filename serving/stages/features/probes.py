"""Leave probes out of what is measured of requests: supervisors and gateways send one every second or two, all day long."""

from __future__ import annotations

import numpy as np

from serving.contract.tensors import PROBE_USER_ID

ALL = slice(None)


def find_asked(user_ids: np.ndarray) -> slice | np.ndarray:
    """Return the rows of requests that are no probes, as an index. user_ids: int64 [B]"""
    is_probe = user_ids == PROBE_USER_ID
    return np.flatnonzero(~is_probe) if is_probe.any() else ALL
