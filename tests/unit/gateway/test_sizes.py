"""A request may ask for and name as many items as the export allows, with a server that answers and without."""

from __future__ import annotations

import json

from tests.unit.gateway.conftest import Gateway, failing


def test_popular_items_are_as_many_as_the_export_returns_and_more_are_refused(own_repo):
    """As of a server that answers: neither the length of a list nor what is refused depends on its health."""
    path = own_repo / "preprocess" / "1" / "stage.json"
    stage = json.loads(path.read_text())
    stage["axes"] |= {"items_returned": 5, "candidates": 8}
    path.unlink()  # it is read-only
    path.write_text(json.dumps(stage))
    doors = [Gateway(own_repo, failing()), Gateway(own_repo, requests_per_s=0.001, burst=1)]
    doors[1].recommend(user=7)
    for door in doors:
        answer = door.recommend(user=7)
        assert (len(answer["items"]), answer["degraded"]) == (5, ["gateway_fallback"])
        assert len(door.recommend(user=7, k=5, among="1,2,3,4,5,6,7,8")["items"]) == 5
        counted = door.read_metric("gateway_fallbacks_total")
        refused = [
            door.read_error("GET", "/v1/recommendations", params={"user": 7} | more)["message"]
            for more in ({"k": 6}, {"among": "1,2,3,4,5,6,7,8,9"})
        ]
        assert "5 items at most" in refused[0]
        assert refused[1] == "among has 9 items; expected 1 to 8. Send fewer."
        assert door.read_metric("gateway_fallbacks_total") == counted
