"""deploy/ against itself, the checkout, and the metrics that a real tritonserver published (metrics.txt, recorded on 2.51).

Docker does not run here: whether the images start is not shown by these tests.
"""

import ast
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import yaml

from export.settings import read_settings
from gateway.metrics import Metrics as GatewayMetrics
from gateway.settings import GatewaySettings
from repository.triton.code import find_imported_files
from serving.contract.distributions import Reference
from serving.contract.measurements import Measurement
from serving.stages.features.coverage import ShownWindow
from serving.stages.features.drift import WINDOW_ROWS, DriftWindow
from serving.stages.features.ids import ItemIndex
from serving.stages.features.new_ids import NewIds
from serving.stages.live import measurements as live
from serving.tables.measurements import measure_tables
from serving.tables.metrics import Metrics as TablesMetrics
from serving.tables.metrics import MissCounts, TableCounts, TableMetrics, UpdaterState
from tests.contract import fake_backend
from tests.monitoring import GPU_METRICS, PANELS, QUERIES, RULES, metric_names, named_metrics

PROJECT = Path(__file__).parents[3]
DEPLOY = PROJECT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


def default_of(text: str) -> str:
    """ "${NAME:-value}/rest" -> "value/rest"."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def mounts() -> list[tuple[str, str, str]]:
    """Return (service, source, target) of every mount."""
    split = [(name, *default_of(mount).split(":")[:2]) for name, own in SERVICES.items() for mount in own.get("volumes", ())]
    return [(name, source, target) for name, source, target in split]


def triton_adapter():
    """Return serving.stages.adapter.triton, which imports what Triton's stub provides inside the server."""
    sys.modules.setdefault("triton_python_backend_utils", fake_backend)
    from serving.stages.adapter import triton

    return triton


def measure_idle_tables() -> list[Measurement]:
    """Return measurements of one table that nobody has asked."""
    table = TableMetrics(TableCounts(), 0, 0, 0, 0, UpdaterState(0, 0, 0, 0.0, 0, False, False))
    return list(measure_tables(TablesMetrics({"items": table}, MissCounts(), {"redis": 0}, {})))


def published_metrics() -> set[str]:
    """Return names that the server publishes: recorded ones, those of the code, those of machines with a GPU."""
    recorded = metric_names((Path(__file__).parent / "metrics.txt").read_text())
    own = {measured.name for measured in triton_adapter().Metrics("rank").list_measurements()}
    own |= {measured.name for measured in measure_idle_tables()}
    gateway = metric_names(GatewayMetrics().render_page().decode())
    names = {*live.STORE, *(f"{name}_total" for name in live.COUNTED), *live.STATED, live.REFUSED}
    names |= {live.SILENT, live.REDIS_SILENT, live.FREE_ROWS}
    own |= {measured.name for name in live.TIMES for measured in live.measure_times(name, live.make_histogram())}
    window = DriftWindow([Reference("price", 100, (0.5, 0.5, 0.0), (0.0,))], categorical=0)
    window.add(np.arange(WINDOW_ROWS), np.empty((WINDOW_ROWS, 0), np.int64), np.zeros((WINDOW_ROWS, 1), np.float32))
    shown = ShownWindow(ItemIndex(np.arange(3)))
    shown.add(np.zeros((WINDOW_ROWS, 1), np.int64))
    requests = {measured.name for source in (window, shown, NewIds()) for measured in source.list_measurements()}
    return recorded | own | GPU_METRICS | gateway | requests | {f"{live.PREFIX}_{name}" for name in names}


def test_the_recorded_metrics_are_those_of_the_code():
    published = published_metrics()
    assert {"recommender_degraded_total", "recommender_stage_seconds_total", "recommender_table_level_down"} <= published
    assert {"nv_inference_request_summary_us", "nv_inference_request_failure"} <= published


def test_every_metric_that_is_drawn_or_alerted_on_is_published():
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    assert {"gateway_fallbacks_total", "recommender_degraded_total"} <= named_metrics()
    assert named_metrics() - published_metrics() == set()
    used = {name for query in QUERIES for name in re.findall(r"\b(?:recommend|gateway):[\w:]+", query)}
    assert used == recorded


def test_the_dashboard_shows_what_the_gateway_answers_and_sheds():
    drawn = " ".join(target["expr"] for panel in PANELS for target in panel.get("targets", ()))
    shown = {"requests_total", "request_duration_seconds_bucket", "fallbacks_total", "shed_total"}
    shown |= {"recommendations_in_flight", "recommendations_limit"}
    assert {f"gateway_{name}" for name in shown} | {"recommender_late_total"} <= set(re.findall(r"\w+", drawn))


def test_quantiles_and_labels_that_are_asked_for_were_published():
    text = (Path(__file__).parent / "metrics.txt").read_text()
    for quantile in {q for query in QUERIES for q in re.findall(r'_summary_us\{[^}]*quantile="([\d.]+)"', query)}:
        assert f'nv_inference_request_summary_us{{model="recommend",version="1",quantile="{quantile}"}}' in text
    assert 'nv_inference_request_failure{model="recommend",reason="CANCELED"' in text
    assert 'recommender_degraded_total{stage="rank"}' in text


def test_our_own_metrics_are_named_as_prometheus_asks():
    """Counters end with _total, and only they; units are seconds and bytes."""
    page = (Path(__file__).parent / "metrics.txt").read_text() + GatewayMetrics().render_page().decode()
    kinds = re.findall(r"^# TYPE ((?:recommender|gateway)_\S+) (\w+)", page, re.MULTILINE)
    kinds += [(measured.name, measured.kind) for measured in triton_adapter().Metrics("rank").list_measurements()]
    kinds += [(measured.name, measured.kind) for measured in measure_idle_tables()]
    assert len(kinds) > 15
    kinds = [(name, kind) for name, kind in kinds if not name.endswith(("_seconds_bucket", "_seconds_sum", "_seconds_count"))]
    assert [name for name, kind in kinds if name.endswith("_total") != (kind == "counter")] == []
    assert [name for name, kind in kinds if kind == "gauge" and re.search(r"_(applied|rejected|lost|refused)\b", name)] == []
    assert [name for name, _ in kinds if re.search(r"_(us|ms|µs|millis|kb|mb|mib|percent)\b", name)] == []


def test_durations_are_histograms():
    """With few requests, quantiles of the latest ones stay for long after them. Triton's own metrics are left out."""
    assert [query for query in QUERIES if re.search(r"recommender_\w+(\{[^}]*quantile)", query)] == []
    drawn = [query for query in QUERIES if re.search(r"recommender_\w+_bucket", query)]
    assert len(drawn) >= 5
    quantiles = re.compile(r"histogram_quantile\(0\.\d+, sum by \((\w+, )?le\) \(rate\(")
    assert [query for query in drawn if not quantiles.match(query)] == []


def test_metrics_that_the_documentation_names_in_full_are_published():
    published = published_metrics()
    shown = published | {re.sub(r"_(bucket|sum|count)$", "", name) for name in published}
    pages = [*(PROJECT / "docs").glob("*.md"), DEPLOY / "README.md"]
    named = {name for page in pages for name in re.findall(r"`(recommender_(?:live|table)_\w+)`", page.read_text())}
    live_page = (PROJECT / "docs" / "live.md").read_text()
    named |= {f"{live.PREFIX}_{name}" for name in re.findall(r"`…_((?:kafka|redis)_\w+)`", live_page)}
    assert len(named) >= 6
    assert named - shown == set()


SLO_ALERT = r'_summary_us\{model="recommend",quantile="([\d.]+)"\}\) > (\d+)'


def test_latency_alerts_are_the_slo():
    bounds = tomllib.loads((PROJECT / "perf" / "slo.toml").read_text())
    stated = {quantile: float(limit) for q in QUERIES for quantile, limit in re.findall(SLO_ALERT, q)}
    assert stated == {"0.99": 1e3 * bounds["p99_ms"]["at_most"], "0.5": 1e3 * bounds["p50_ms"]["at_most"]}


def test_every_alert_says_what_is_wrong_and_what_to_do():
    alerts = [rule for rule in RULES if "alert" in rule]
    assert len(alerts) >= 10
    for alert in alerts:
        assert alert["labels"]["severity"] in ("page", "ticket")
        assert {"summary", "action"} <= alert["annotations"].keys()


def test_every_alert_has_a_test_that_raises_it_and_one_that_does_not():
    tests = yaml.safe_load((DEPLOY / "prometheus" / "alerts.test.yml").read_text())["tests"]
    raised = {case["alertname"] for test in tests for case in test.get("alert_rule_test", ()) if case.get("exp_alerts")}
    expected = [sample for test in tests for case in test.get("promql_expr_test", ()) for sample in case["exp_samples"]]
    raised |= {name for sample in expected for name in re.findall(r'alertname="(\w+)"', sample["labels"])}
    assert {rule["alert"] for rule in RULES if "alert" in rule} == raised
    quiet = tests[-1]
    assert quiet["promql_expr_test"] == [{"expr": "ALERTS", "eval_time": "2h", "exp_samples": []}]
    given = " ".join(series["series"] for series in quiet["input_series"])
    asked = " ".join(rule["expr"] for rule in RULES)
    assert {name for name in named_metrics() if re.search(rf"\b{name}\b", asked)} <= set(re.findall(r"\w+", given))


def test_alerts_name_the_jobs_that_prometheus_scrapes():
    """With the Prometheus Operator too, which would name a job after its PodMonitor."""
    named = {job for query in QUERIES for job in re.findall(r'job="(\w+)"', query)}
    assert named == {"triton", "gateway"}
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert {job["job_name"] for job in scraped} == named
    path = DEPLOY / "kubernetes" / "components" / "prometheus-operator" / "pod-monitor.yaml"
    endpoints = yaml.safe_load(path.read_text())["spec"]["podMetricsEndpoints"]
    jobs = {endpoint["port"]: [(r["targetLabel"], r["replacement"]) for r in endpoint["relabelings"]] for endpoint in endpoints}
    assert jobs == {"metrics": [("job", "triton")], "http": [("job", "gateway")]}


def test_panels_do_not_overlap_and_all_ask_something():
    seen: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & seen
        assert place["x"] + place["w"] <= 24
        seen |= cells
        assert panel["type"] == "row" or panel["targets"]
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


def test_services_refer_to_services_volumes_and_networks_that_exist():
    for name, service in SERVICES.items():
        assert set(service.get("depends_on", ())) <= SERVICES.keys(), name
        assert set(service["networks"]) <= COMPOSE["networks"].keys(), name
        assert "image" in service or "build" in service
    named = {source for _, source, _ in mounts() if not source.startswith((".", "/"))}
    assert named == COMPOSE["volumes"].keys()


def test_who_is_waited_for_tells_when_it_is_ready():
    depends = [service.get("depends_on") for service in SERVICES.values()]
    waits = [wait for waited in depends if isinstance(waited, dict) for wait in waited.items()]
    healthy = {name for name, wait in waits if wait["condition"] == "service_healthy"}
    assert healthy
    assert [name for name in healthy if "healthcheck" not in SERVICES[name]] == []


@pytest.mark.parametrize(
    ("said", "healthy"), [("PONG", True), ("LOADING Redis is loading the dataset in memory", False), ("", False)]
)
def test_a_redis_is_healthy_when_it_answers_and_not_when_it_says_why_not(tmp_path, said, healthy):
    (tmp_path / "redis-cli").write_text(f"#!/bin/sh\necho '{said}'\n")
    (tmp_path / "redis-cli").chmod(0o755)
    for name in ("redis-1", "redis-2", "redis-3"):
        kind, *command = SERVICES[name]["healthcheck"]["test"]
        check = ["/bin/sh", "-c", *command] if kind == "CMD-SHELL" else command
        run = subprocess.run(check, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, stdout=subprocess.DEVNULL)
        assert (run.returncode == 0) == healthy


def test_mounted_paths_exist_in_the_checkout():
    paths = [source for _, source, _ in mounts() if source.startswith((".", "/"))]
    assert paths
    assert [path for path in paths if not (DEPLOY / path).exists()] == []
    build = SERVICES["triton"]["build"]
    assert (DEPLOY / build["context"]).resolve() == PROJECT
    assert (PROJECT / build["dockerfile"]).is_file()


def test_the_image_is_built_from_files_that_exist():
    copied = re.findall(r"^COPY (.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    sources = [source for line in copied for source in line.split()]
    assert {Path(source).name for source in sources} == {"build_engines.py", "preflight.py", "start.sh", "alive.py"}
    assert all((PROJECT / source).is_file() for source in sources)
    server = yaml.safe_load((DEPLOY / "kubernetes" / "overlays" / "gpu" / "server.yaml").read_text())
    container = server["spec"]["template"]["spec"]["containers"][0]
    (probed,) = [Path(word) for word in container["livenessProbe"]["exec"]["command"] if word.endswith(".py")]
    assert probed.parent == Path("/opt/recommender")
    assert probed.name in {Path(source).name for source in sources}


def test_a_pod_with_a_gpu_copies_the_repository_again_when_its_node_restarts(tmp_path):
    server = yaml.safe_load((DEPLOY / "kubernetes" / "overlays" / "gpu" / "server.yaml").read_text())
    (init,) = server["spec"]["template"]["spec"]["initContainers"]
    published, own = tmp_path / "published", tmp_path / "own"
    (published / "rank" / "1").mkdir(parents=True)
    (published / "rank" / "1" / "model.onnx").write_text("former")
    (published / "rank" / "1" / "model.onnx").chmod(0o444)
    own.mkdir()
    command = [word.replace("/published", str(published)).replace("/srv/models", str(own)) for word in init["command"]]
    subprocess.run(command, check=True)
    (own / "rank" / "1" / "model.plan").write_text("an engine of the former network")
    shutil.rmtree(published)  # a merlin export replaces the whole folder
    (published / "rank" / "1").mkdir(parents=True)
    (published / "rank" / "1" / "model.onnx").write_text("newer")
    subprocess.run(command, check=True)
    files = {str(path.relative_to(own)): path.read_text() for path in own.rglob("*") if path.is_file()}
    assert files == {"rank/1/model.onnx": "newer"}


def test_preflight_names_the_packages_that_the_image_is_built_with():
    """numpy and Faiss are pinned together: a Faiss after 1.12.0 does not take numpy < 2."""
    (line,) = re.findall(r"^RUN pip install (.+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    installed = set(shlex.split(line)) - {"--no-cache-dir"}
    pinned = {line.split()[0] for line in (PROJECT / "requirements" / "serve.txt").read_text().splitlines()}
    assert installed - pinned == {"faiss-gpu-cu12==1.12.0", "onnxruntime>=1.15.1,<=1.31.1"}
    assert {"onnxruntime==1.31.1", "numpy==1.26.4"} <= pinned
    preflight = runpy.run_path(str(DEPLOY / "preflight.py"))
    packages = [each for kind in ("PACKAGES", "TABLE_PACKAGES", "LIVE_PACKAGES") for each in preflight[kind].values()]
    named = {re.split("[<=>]", package)[0] for package in packages}
    assert named <= {re.split("[<=>]", package)[0] for package in installed}


def test_preflight_demands_every_package_that_the_stages_import():
    """Without lmdb in the image, for example, no Python model would load there."""
    parts = ("serving.stages.parts.triton", "serving.stages.parts.models")
    imported = {name for file in find_imported_files(parts) for name in list_imported_packages(file)}
    preflight = runpy.run_path(str(DEPLOY / "preflight.py"))
    sometimes = {module.split(".")[0] for module in (*preflight["TABLE_PACKAGES"], *preflight["LIVE_PACKAGES"])}
    always = set(preflight["PACKAGES"]) | {"llvmlite"}  # numba's own
    assert imported - always - sometimes == {"triton_python_backend_utils"}
    hide = f"import sys; sys.modules |= dict.fromkeys({sorted(sometimes)}); import {parts[1]}"
    subprocess.run([sys.executable, "-c", hide], cwd=PROJECT, check=True)


def list_imported_packages(path: Path) -> set[str]:
    """-> the first names of the modules that a file imports from outside of the standard library and of this project."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"serving"}


def test_one_image_name_everywhere():
    (default,) = re.findall(r"^ARG BASE=(\S+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert default_of(SERVICES["triton"]["build"]["args"]["BASE"]) == default
    assert default in (DEPLOY / "README.md").read_text()


def test_addresses_are_those_of_the_services():
    addresses = [SERVICES[name]["networks"]["back"]["ipv4_address"] for name in ("redis-1", "redis-2", "redis-3")]
    assert len(set(addresses)) == 3
    assert SERVICES["redis-cluster"]["environment"]["NODES"].split() == [f"{address}:7000" for address in addresses]
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == ["triton:8002"]
    assert scraped["rule_files"] == ["alerts.yml"]
    assert (DEPLOY / "prometheus" / "alerts.yml").is_file()
    source = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    assert {p["datasource"]["uid"] for p in PANELS if "datasource" in p} == {source["datasources"][0]["uid"]}
    provider = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "dashboards" / "recommender.yml").read_text())
    folder = provider["providers"][0]["options"]["path"]
    assert ("grafana", "./grafana/dashboards", folder) in mounts()


def test_live_updates_are_exported_for_these_services():
    tables = read_settings(DEPLOY / "live-updates.toml").tables
    assert tables.redis in SERVICES["redis-cluster"]["environment"]["NODES"].split()
    assert f"INSIDE://{tables.brokers}" in SERVICES["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"].split(",")
    assert ("triton", "tables", tables.state) in mounts()


def test_update_messages_fit_through_the_broker():
    assert SERVICES["kafka"]["environment"]["KAFKA_MESSAGE_MAX_BYTES"] >= (256 << 10) + (1 << 10)


@pytest.mark.parametrize("script", sorted(DEPLOY.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_sound_for_their_shell(script):
    shell = script.read_text().splitlines()[0].removeprefix("#!").removeprefix("/usr/bin/env ")
    subprocess.run([*shell.split(), "-n", str(script)], check=True)
    assert script.stat().st_mode & 0o111


# Names of the standard library that CPython 3.11 brought, of those that this code might use
NAMED_TUPLE_WITH_BASE = "class of NamedTuple and another base"
SINCE_3_11 = {
    NAMED_TUPLE_WITH_BASE,
    *("ExceptionGroup", "LiteralString", "Self", "StrEnum", "TaskGroup", "UTC"),
    *("assert_never", "chdir", "file_digest", "timeout_at", "tomllib"),
}
SINCE_3_9 = {"removeprefix", "removesuffix", "pairwise", "strict"}  # strict: zip's
OLDEST = {"deploy/preflight.py": (3, 8), "deploy/alive.py": (3, 8), "export/nvidia/tensorrt/build_engines.py": (3, 8)}
IN_THE_CONTAINER = [
    *OLDEST,
    *(
        "training/features/operators.py",
        "export/nvidia/workflow_model.py",
    ),  # a repository for these containers has them as well
    *sorted(str(path.relative_to(PROJECT)) for path in (PROJECT / "serving").rglob("*.py")),
]


def list_names(path: Path, version: tuple[int, int]) -> set[str]:
    """Return the names that a file uses or imports, and its keyword arguments. SyntaxError where that Python cannot read it."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text(), str(path), feature_version=version)):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.alias):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        elif isinstance(node, ast.keyword):
            names.add(node.arg or "")
        elif isinstance(node, ast.ClassDef) and len(node.bases) > 1 and "NamedTuple" in map(ast.unparse, node.bases):
            names.add(NAMED_TUPLE_WITH_BASE)
    return names


def test_what_runs_in_the_container_runs_on_its_python():
    """merlin-hugectr:24.06 has CPython 3.10; the two scripts promise 3.8."""
    newer = {}
    for name in IN_THE_CONTAINER:
        version = OLDEST.get(name, (3, 10))
        newer[name] = list_names(PROJECT / name, version) & (SINCE_3_11 | (SINCE_3_9 if version < (3, 9) else set()))
    assert {name: found for name, found in newer.items() if found} == {}


def test_istio_lets_the_gateway_answer_within_every_deadline():
    documents = yaml.safe_load_all((DEPLOY / "kubernetes" / "overlays" / "istio-canary" / "traffic.yaml").read_text())
    routes = next(each for each in documents if each["kind"] == "VirtualService")["spec"]["http"]
    limits = {route["name"]: route.get("retries", {}).get("perTryTimeout") for route in routes}
    assert float(limits.pop("recommendations").removesuffix("s")) > GatewaySettings().most_deadline_ms / 1_000
    assert set(limits.values()) == {None}  # explanations and reports take longer
