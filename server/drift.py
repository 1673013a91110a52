"""Read from a server's metrics page how far requests have drifted since a generation's export, for the record.

A generation's drift is known to the processes that serve it alone, so it is written down when another one takes over.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 2.0
PSI, BOUND = "recommender_drift_psi", "recommender_drift_psi_bound"


def describe_drift(page_url: str, generation: int) -> str:
    """Return which features and scores of a generation have drifted in the last windows, the farthest first, in words."""
    try:
        with urllib.request.urlopen(page_url, timeout=TIMEOUT_S) as response:
            page = response.read().decode()
    except (OSError, ValueError) as error:
        return f"its drift is not known ({error})"
    drifts = sorted(read_drifts(page, generation), reverse=True)
    if not drifts:
        return "its drift is not known (no full window of requests)"
    moved = [f"{name} (PSI {psi:.2g}, by chance {bound:.2g})" for over, name, psi, bound in drifts if over > 1]
    return f"drifted: {', '.join(moved)}" if moved else f"none of {len(drifts)} features and scores had drifted"


def read_drifts(page: str, generation: int) -> Iterator[tuple[float, str, float, float]]:
    """Yield PSI / bound, name, PSI and bound of each feature; of several processes, the one that has drifted farthest."""
    values: dict[tuple[str, str, str], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in (PSI, BOUND) and sample.labels.get("version") == str(generation):
                values[sample.name, sample.labels["feature"], sample.labels.get("instance", "")] = sample.value
    farthest: dict[str, tuple[float, str, float, float]] = {}
    for (name, feature, instance), psi in values.items():
        if name == PSI and (bound := values.get((BOUND, feature, instance))):
            farthest[feature] = max(farthest.get(feature, (0.0, feature, 0.0, 0.0)), (psi / bound, feature, psi, bound))
    yield from farthest.values()
