"""The queries that deploy/ sends to Prometheus, of alerts and panels, and the metrics that they name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from serving.stages.live.measurements import PREFIX, REDIS_SILENT, SILENT

DEPLOY = Path(__file__).parents[1] / "deploy"
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PANELS = json.loads((DEPLOY / "grafana" / "dashboards" / "recommender.json").read_text())["panels"]
QUERIES = [rule["expr"] for rule in RULES] + [target["expr"] for panel in PANELS for target in panel.get("targets", ())]
# Only on a machine with a GPU: the names of Triton's docs/user_guide/metrics.md
GPU_METRICS = {"nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"}
# Only of servers with Kafka (tests/server/test_faults.py) and with Redis (tests/server/test_redis.py)
BACKEND_METRICS = {f"{PREFIX}_{name}" for name in (SILENT, REDIS_SILENT)}


def named_metrics() -> set[str]:
    """Return the metrics that an alert or a panel names, those that rules record left out."""
    text = (name for query in QUERIES for name in re.findall(r"(?<![:\w])(?:nv|recommender|gateway)_\w+", query))
    return set(text)


def metric_names(page: str) -> set[str]:
    """Return the names of the samples that a metrics page has or announces (a histogram's by their suffixes)."""
    names = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)", page, re.MULTILINE):
        parts = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("", "_sum", "_count")}.get(kind, ("",))
        names |= {name + part for part in parts}
    return names
