"""Cache hit rates out of a server's metrics page: the embedding tables' levels, and every counter pair …hit… / …miss…."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, str], float]
TABLE_ROWS = "recommender_table_rows_total"  # by what answered (serving/contract/measurements.py)
TABLES = "tables"  # how the names of their rates begin
REPORTED_AFTER_S = 2.5  # models tell their counts every second (serving/stages/adapter/triton.py)
LEVELS = ("l1", "l2", "l3")


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
    """-> "what labels" -> share of lookups between two readings that hit; what was not looked up in is left out."""
    rates = table_hit_rates(before, after)
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


def table_hit_rates(before: Samples, after: Samples) -> dict[str, float]:
    """-> "tables, level" -> share of the rows that reached a level and were there, of all tables and processes together."""
    rows: Counter[str] = Counter()
    for (name, labels), value in after.items():
        if name == TABLE_ROWS:
            answer = dict(label.split("=", 1) for label in labels.split(","))["answer"]
            rows[answer] += value - before.get((name, labels), 0.0)
    rates, reached = {}, rows.total()
    for level in LEVELS:
        if reached > 0:
            rates[f"{TABLES}, {level}"] = rows[level] / reached
        reached -= rows[level]
    return rates
