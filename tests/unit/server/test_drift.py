"""The record states the drift of a generation that another one replaces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.drift import describe_drift
from tests.pages import serve_page


@pytest.fixture
def page() -> Iterator[list[str]]:
    """Lines of a metrics page, and its address before them."""
    lines: list[str] = []
    with serve_page(lambda: "".join(f"{line}\n" for line in lines[1:]).encode()) as url:
        lines.append(f"{url}/metrics")
        yield lines


def state_psi(feature: str, psi: float, bound: float, version: int = 1, instance: str = "preprocess_0_0") -> list[str]:
    labels = f'{{feature="{feature}",instance="{instance}",version="{version}"}}'
    return [f"recommender_drift_psi{labels} {psi}", f"recommender_drift_psi_bound{labels} {bound}"]


def test_features_that_drifted_are_named_the_farthest_first(page):
    page += state_psi("price", 0.06, 0.05) + state_psi("price", 0.01, 0.05, instance="preprocess_0_1")
    page += state_psi("rank_score", 0.5, 0.05) + state_psi("brand", 0.04, 0.05)
    assert describe_drift(page[0], 1) == "drifted: rank_score (PSI 0.5, by chance 0.05), price (PSI 0.06, by chance 0.05)"


def test_other_generations_do_not_count(page):
    page += state_psi("price", 0.01, 0.05) + state_psi("price", 0.5, 0.05, version=2)
    assert describe_drift(page[0], 1) == "none of 1 features and scores had drifted"
    assert describe_drift(page[0], 3) == "its drift is not known (no full window of requests)"


def test_a_page_that_does_not_answer_is_said(page):
    assert describe_drift("http://127.0.0.1:9/metrics", 1).startswith("its drift is not known (")
