"""Read from a server's metrics page how far requests have drifted since a generation's export, for the record.

A generation's drift is known to the processes that serve it alone, so it is written down when another one takes over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from prometheus_client.samples import Sample

from server.status.metrics_page import read_samples
from serving.contract.distributions import LEAST_INDEPENDENT

PSI, BOUND = "recommender_drift_psi", "recommender_drift_psi_bound"
INDEPENDENT = "recommender_drift_independent_requests"

Values = dict[tuple[str, str, str], float]  # by metric, feature (or what is watched) and process


def describe_drift(page_url: str, generation: int) -> str:
    """Return which features and scores of a generation have drifted in the last windows, the farthest first, in words.

    Windows that are worth too few independent requests are not judged, and named.
    """
    try:
        values = choose_values(read_samples(page_url, generation))
    except (OSError, ValueError) as error:
        return f"its drift is not known ({error})"
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


def choose_values(samples: Sequence[Sample]) -> Values:
    """Return the values of PSI, BOUND and INDEPENDENT."""
    values: Values = {}
    for sample in samples:
        if sample.name in (PSI, BOUND, INDEPENDENT):
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
