"""Cache hit rates out of a server's metrics page: every counter pair …hit… / …miss… with the same labels."""

from __future__ import annotations

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, str], float]


def read_samples(metrics_url: str) -> Samples:
    """-> (metric, labels as text) -> value; nothing when there is no metrics page."""
    try:
        with urllib.request.urlopen(metrics_url, timeout=5) as page:
            return parse(page.read().decode())
    except (urllib.error.URLError, TimeoutError):
        return {}


def parse(text: str) -> Samples:
    return {
        (sample.name, ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def hit_rates(before: Samples, after: Samples) -> dict[str, float]:
    """-> "what labels" -> share of lookups between two readings that hit; pairs without lookups are left out."""
    rates = {}
    for (name, labels), hits_after in after.items():
        partner = name.replace("hit", "miss").replace("misss", "misses")
        if "hit" not in name or (partner, labels) not in after:
            continue
        hits = hits_after - before.get((name, labels), 0.0)
        misses = after[partner, labels] - before.get((partner, labels), 0.0)
        if hits + misses > 0:
            what = name.split("hit")[0].strip("_")
            rates[f"{what} {labels}".strip()] = hits / (hits + misses)
    return rates
