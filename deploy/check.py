"""`make check-deploy`: render and validate everything in deploy/, offline. Exit code 1 with a line for each fault.

    kustomize ─▶ Kubernetes' own kinds: kubernetes-validate (JSON schemas)     ┐
                 Istio, KEDA, Prometheus Operator: cloudcoil's models           ├─▶ references between them (references.py)
                 KServe: the fields that are its own, and the pod as a Pod      ┘
    promtool, amtool ─▶ rules, their tests, configurations
    systemd-analyze ─▶ units

Runs in an environment of its own (requirements/deploy.txt). A program that is missing is a fault.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kubernetes_validate
import yaml
from cloudcoil.models.istio.networking import v1 as istio_networking
from cloudcoil.models.istio.security import v1 as istio_security
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as prometheus_operator
from pydantic import ValidationError
from references import find_reference_faults

HERE = Path(__file__).parent
OVERLAYS = HERE / "kubernetes" / "overlays"
KUBERNETES = "1.32"
MODELS: dict[str, Any] = {
    "networking.istio.io/v1": istio_networking,
    "security.istio.io/v1": istio_security,
    "keda.sh/v1alpha1": keda,
    "monitoring.coreos.com/v1": prometheus_operator,
}
KSERVE = "serving.kserve.io/v1beta1"
KSERVE_FIELDS = {
    "minReplicas",
    "maxReplicas",
    "scaleTarget",
    "scaleMetric",
    "canaryTrafficPercent",
    "timeout",
    "logger",
    "batcher",
}
PROGRAMS = {"promtool": "prometheus", "amtool": "prometheus-alertmanager", "systemd-analyze": "systemd"}  # and Debian's package


def main() -> int:
    faults = list(find_faults())
    for fault in faults:
        print(f"fault: {fault}")
    print(f"check-deploy: {len(faults)} faults" if faults else "check-deploy: all is valid")
    return bool(faults)


def find_faults() -> Iterator[str]:
    for overlay in sorted(OVERLAYS.iterdir()):
        yield from (f"{overlay.name}: {fault}" for fault in find_overlay_faults(overlay))
    yield from find_monitoring_faults()
    yield from find_unit_faults()


def find_overlay_faults(overlay: Path) -> Iterator[str]:
    kubectl = Path(sys.executable).with_name("kubectl")
    if not kubectl.exists():
        yield f"{kubectl} is missing, so it was not rendered. Install requirements/deploy.txt"
        return
    rendered = subprocess.run([kubectl, "kustomize", overlay], capture_output=True, text=True)
    if rendered.returncode:
        yield f"kustomize: {rendered.stderr.strip()}"
        return
    documents = [document for document in yaml.safe_load_all(rendered.stdout) if document]
    for document in documents:
        name = f"{document['kind']} {document['metadata']['name']}"
        yield from (f"{name}: {fault}" for fault in find_document_faults(document))
    yield from find_reference_faults([convert_to_pod(each) if each["apiVersion"] == KSERVE else each for each in documents])
    print(f"{overlay.name}: {len(documents)} documents")


def find_document_faults(document: dict[str, Any]) -> Iterator[str]:
    """Yield where a document differs from the schema of its kind."""
    version = document["apiVersion"]
    if version in MODELS:
        if model := getattr(MODELS[version], document["kind"], None):
            yield from find_model_faults(document, model)
        else:
            yield f"{version} has no kind {document['kind']}"
    elif version == KSERVE:
        predictor = document["spec"]["predictor"]
        if not 0 <= predictor.get("canaryTrafficPercent", 0) <= 100:
            yield "canaryTrafficPercent is no percentage"
        yield from find_document_faults(convert_to_pod(document))
    else:
        try:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{'.'.join(map(str, error.path))}: {error.message}"
        except (kubernetes_validate.SchemaNotFoundError, kubernetes_validate.InvalidSchemaError) as error:
            yield f"no schema of Kubernetes {KUBERNETES}: {error}"


def find_model_faults(document: dict[str, Any], model: type) -> Iterator[str]:
    try:
        read = model.model_validate(document).model_dump(by_alias=True, exclude_none=True, mode="json")
    except ValidationError as error:
        for fault in error.errors():
            yield f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
        return
    yield from (f"{path} is an unknown field" for path in list_lost_fields(document, read))  # the models ignore unknown fields


def list_lost_fields(document: Any, read_document: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of given fields that the model did not read."""
    if isinstance(document, dict) and isinstance(read_document, dict):
        for key, value in document.items():
            if key not in read_document and value is not None:
                yield f"{path}{key}"
            else:
                yield from list_lost_fields(value, read_document.get(key), f"{path}{key}.")
    elif isinstance(document, list) and isinstance(read_document, list):
        for place, (one, other) in enumerate(zip(document, read_document, strict=True)):
            yield from list_lost_fields(one, other, f"{path}{place}.")


def convert_to_pod(document: dict[str, Any]) -> dict[str, Any]:
    """Return an InferenceService as the Pod that its predictor describes, without the fields that are KServe's own."""
    spec = {name: value for name, value in document["spec"]["predictor"].items() if name not in KSERVE_FIELDS}
    labels = {"serving.kserve.io/inferenceservice": document["metadata"]["name"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {**document["metadata"], "labels": labels}, "spec": spec}


def find_monitoring_faults() -> Iterator[str]:
    folder = HERE / "prometheus"
    yield from run_check("promtool", "check", "rules", "alerts.yml", cwd=folder)
    yield from run_check("promtool", "check", "config", "--syntax-only", "prometheus.yml", cwd=folder)
    yield from run_check("promtool", "test", "rules", "alerts.test.yml", cwd=folder)
    yield from run_check("amtool", "check-config", "alertmanager.yml", cwd=HERE / "alertmanager")


def find_unit_faults() -> Iterator[str]:
    """Yield systemd's complaints about the units, with this checkout in place of /opt/recommender."""
    with TemporaryDirectory() as folder:
        units = []
        for unit in sorted((HERE / "systemd").glob("*.[st]*")):
            units.append(Path(folder, unit.name))
            units[-1].write_text(unit.read_text().replace("/opt/recommender", str(HERE.parent)))
        yield from run_check("systemd-analyze", "verify", "--man=no", *map(str, units), cwd=HERE, silent=True)


def run_check(program: str, *arguments: str, cwd: Path, silent: bool = False) -> Iterator[str]:
    """Run a checking program; yield its output if it fails. silent: any output on stderr is a failure too"""
    if not shutil.which(program):
        yield f"{program} is not installed, so {' '.join(arguments)} was not checked. apt-get install {PROGRAMS[program]}"
        return
    run = subprocess.run([program, *arguments], cwd=cwd, capture_output=True, text=True)
    if run.returncode or (silent and run.stderr):
        yield f"{program} {' '.join(arguments)}: {(run.stdout + run.stderr).strip()}"
    else:
        print(f"{program} {' '.join(arguments)}: passed")


if __name__ == "__main__":
    sys.exit(main())
