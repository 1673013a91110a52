"""Leave probes out of what is measured of requests: supervisors and gateways send one every second or two, all day long."""

from __future__ import annotations

import numpy as np

from serving.contract.tensors import PROBE_USER_ID

ALL = slice(None)


def find_asked(user_ids: np.ndarray, left_out: np.ndarray | bool = False) -> slice | np.ndarray:
    """Return the rows of requests that are no probes, as an index. user_ids: int64 [B]; left_out: bool [B], others to skip"""
    is_left_out = (user_ids == PROBE_USER_ID) | left_out
    return np.flatnonzero(~is_left_out) if is_left_out.any() else ALL
