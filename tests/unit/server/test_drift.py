"""The record states the drift of a generation that another one replaces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.status.drift import describe_drift
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


def state_independent(requests: float, instance: str = "preprocess_0_0") -> str:
    labels = f'{{watched="features",instance="{instance}",version="1"}}'
    return f"recommender_drift_independent_requests{labels} {requests}"


def test_features_that_drifted_are_named_the_farthest_first(page):
    page += state_psi("price", 0.06, 0.05) + state_psi("price", 0.01, 0.05, instance="preprocess_0_1")
    page += state_psi("rank_score", 0.5, 0.05) + state_psi("brand", 0.04, 0.05)
    assert describe_drift(page[0], 1) == "drifted: rank_score (PSI 0.5, by chance 0.05), price (PSI 0.06, by chance 0.05)"


def test_other_generations_do_not_count(page):
    page += state_psi("price", 0.01, 0.05) + state_psi("price", 0.5, 0.05, version=2)
    assert describe_drift(page[0], 1) == "none of 1 features and scores had drifted"
    assert describe_drift(page[0], 3) == "its drift is not known (no full window of requests)"


FEW = (
    " (a window was worth 4 independent requests, of 32 that a verdict needs: one user id, or a few, made many of its requests)"
)


def test_windows_that_tell_nothing_have_no_verdict_and_are_named(page):
    page += [*state_psi("price", 8.3, float("inf")), state_independent(4)]
    assert describe_drift(page[0], 1) == f"its drift is not known{FEW}"
    page += [*state_psi("price", 0.01, 0.05, instance="preprocess_0_1"), state_independent(1_900, "preprocess_0_1")]
    assert describe_drift(page[0], 1) == f"none of 1 features and scores had drifted{FEW}"
    page += state_psi("brand", 0.06, 0.05, instance="preprocess_0_1")
    assert describe_drift(page[0], 1) == f"drifted: brand (PSI 0.06, by chance 0.05){FEW}"


def test_features_without_a_bound_are_not_counted(page):
    page += state_psi("price", 0.01, 0.05) + state_psi("aggregate_views", 3.0, float("inf")) + [state_independent(32)]
    assert describe_drift(page[0], 1) == "none of 1 features and scores had drifted"


def test_a_page_that_does_not_answer_is_said(page):
    assert describe_drift("http://127.0.0.1:9/metrics", 1).startswith("its drift is not known (")


def test_a_page_without_metrics_is_said(page):
    page.append("{ this is no metric")
    said = describe_drift(page[0], 1)
    assert said.startswith("its drift is not known (")
    assert "no full window" not in said
