"""Read what a server's metrics page says of one generation."""

from __future__ import annotations

import urllib.request
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

TIMEOUT_S = 2.0


def read_samples(page_url: str, generation: int) -> list[Sample]:
    """Return the samples of a generation's models. Raises OSError or ValueError where there is no such page."""
    try:
        with urllib.request.urlopen(page_url, timeout=TIMEOUT_S) as response:
            page = response.read().decode()
    except HTTPException as error:  # another program answers there
        raise OSError(f"{page_url} does not speak HTTP: {error!r}") from error
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return [sample for sample in samples if sample.labels.get("version") == str(generation)]
