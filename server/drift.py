"""Read from a server's metrics page how far requests have drifted since a generation's export, for the record.

A generation's drift is known to the processes that serve it alone, so it is written down when another one takes over.
"""

from __future__ import annotations

import math
import urllib.request
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

from serving.contract.distributions import LEAST_INDEPENDENT

TIMEOUT_S = 2.0
PSI, BOUND = "recommender_drift_psi", "recommender_drift_psi_bound"
INDEPENDENT = "recommender_drift_independent_requests"

Values = dict[tuple[str, str, str], float]  # by metric, feature (or what is watched) and process


def describe_drift(page_url: str, generation: int) -> str:
    """Return which features and scores of a generation have drifted in the last windows, the farthest first, in words.

    Windows that are worth too few independent requests are not judged, and named.
    """
    try:
        with urllib.request.urlopen(page_url, timeout=TIMEOUT_S) as response:
            page = response.read().decode()
    except (OSError, ValueError) as error:
        return f"its drift is not known ({error})"
    values = read_values(page, generation)
    drifts = sorted(find_farthest(values), reverse=True)
    moved = [f"{name} (PSI {psi:.2g}, by chance {bound:.2g})" for over, name, psi, bound in drifts if over > 1]
    if not drifts:
        verdict = "its drift is not known"
    elif moved:
        verdict = f"drifted: {', '.join(moved)}"
    else:
        verdict = f"none of {len(drifts)} features and scores had drifted"
    independent = min((value for (name, *_), value in values.items() if name == INDEPENDENT), default=math.inf)
    if independent < LEAST_INDEPENDENT:
        few = f"a window was worth {independent:.3g} independent requests, of {LEAST_INDEPENDENT} that a verdict needs"
        return f"{verdict} ({few}: one user id, or a few, made many of its requests)"
    return verdict if drifts else f"{verdict} (no full window of requests)"


def read_values(page: str, generation: int) -> Values:
    """Return the values of PSI, BOUND and INDEPENDENT of a generation."""
    values: Values = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in (PSI, BOUND, INDEPENDENT) and sample.labels.get("version") == str(generation):
                watched = sample.labels["watched" if sample.name == INDEPENDENT else "feature"]
                values[sample.name, watched, sample.labels.get("instance", "")] = sample.value
    return values


def find_farthest(values: Values) -> Iterator[tuple[float, str, float, float]]:
    """Yield PSI / bound, name, PSI and bound of each feature with a finite bound, from the process that drifted farthest."""
    farthest: dict[str, tuple[float, str, float, float]] = {}
    for (name, feature, instance), psi in values.items():
        if name == PSI and 0 < (bound := values.get((BOUND, feature, instance), 0.0)) < math.inf:
            farthest[feature] = max(farthest.get(feature, (0.0, feature, 0.0, 0.0)), (psi / bound, feature, psi, bound))
    yield from farthest.values()
