"""The check of references between Kubernetes documents: each fault is found, and sound documents pass."""

import copy
import importlib.util
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[3] / "deploy"


@pytest.fixture(scope="module")
def find_reference_faults():
    """The file is loaded by path, because deploy/ is no package: `make check-deploy` runs it in its own environment."""
    spec = importlib.util.spec_from_file_location("references", DEPLOY / "references.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda documents: list(module.find_reference_faults(documents))


LOCKED = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
CONTAINER = {
    "name": "gateway",
    "ports": [{"name": "http", "containerPort": 8080}],
    "readinessProbe": {"httpGet": {"path": "/readyz", "port": "http"}},
    "resources": {"limits": {"memory": "1Gi"}},
    "securityContext": LOCKED,
    "volumeMounts": [{"name": "tokens", "mountPath": "/tokens"}, {"name": "live", "mountPath": "/srv"}],
}
POD = {
    "automountServiceAccountToken": False,
    "securityContext": {"runAsNonRoot": True, "runAsUser": 10001},
    "containers": [CONTAINER],
    "volumes": [{"name": "tokens", "secret": {"secretName": "recommender-tokens"}}],
}


JOB = {
    "metadata": {"labels": {"app": "round"}},
    "spec": POD
    | {
        "containers": [{name: value for name, value in CONTAINER.items() if name not in ("ports", "readinessProbe")}],
        "volumes": [
            {"name": "live", "persistentVolumeClaim": {"claimName": "live-shop-0"}},
            {"name": "tokens", "secret": {"secretName": "recommender-tokens"}},
        ],
    },
}


def make_document(kind, spec):
    return {"kind": kind, "metadata": {"name": "shop"}, "spec": spec}


@pytest.fixture
def documents():
    labels = {"app": "shop", "track": "stable"}
    claims = [{"metadata": {"name": "live"}}]
    subsets = [{"name": "stable", "labels": {"track": "stable"}}]
    route = {"name": "all", "route": [{"destination": {"host": "shop", "subset": "stable"}, "weight": 100}]}
    return copy.deepcopy(
        [
            make_document(
                "StatefulSet", {"template": {"metadata": {"labels": labels}, "spec": POD}, "volumeClaimTemplates": claims}
            ),
            make_document("Service", {"selector": {"app": "shop"}, "ports": [{"port": 80, "targetPort": "http"}]}),
            make_document(
                "NetworkPolicy", {"podSelector": {"matchLabels": {"app": "shop"}}, "ingress": [{"ports": [{"port": "http"}]}]}
            ),
            make_document("PodDisruptionBudget", {"selector": {"matchLabels": {"app": "shop"}}}),
            make_document("HorizontalPodAutoscaler", {"scaleTargetRef": {"kind": "StatefulSet", "name": "shop"}}),
            make_document("DestinationRule", {"host": "shop", "subsets": subsets}),
            make_document("VirtualService", {"http": [route]}),
            {"metadata": {"name": "round"}, "kind": "CronJob", "spec": {"jobTemplate": {"spec": {"template": JOB}}}},
        ]
    )


def test_sound_documents_pass(find_reference_faults, documents):
    assert find_reference_faults(documents) == []


def pod(documents):
    return documents[0]["spec"]["template"]["spec"]


def job(documents):
    return documents[7]["spec"]["jobTemplate"]["spec"]["template"]["spec"]


BROKEN = {
    "which no pod has": lambda d: d[1]["spec"].update(selector={"app": "shops"}),
    "PodDisruptionBudget shop: selects": lambda d: d[3]["spec"].update(selector={"matchLabels": {"app": "other"}}),
    "names port grpc": lambda d: d[1]["spec"]["ports"].append({"port": 1, "targetPort": "grpc"}),
    "names port metrics": lambda d: d[2]["spec"]["ingress"][0]["ports"].append({"port": "metrics"}),
    "scales StatefulSet shop, which states `replicas`": lambda d: d[0]["spec"].update(replicas=2),
    "scales Deployment shop": lambda d: d[4]["spec"].update(scaleTargetRef={"kind": "Deployment", "name": "shop"}),
    "goes to": lambda d: d[6]["spec"]["http"][0]["route"][0]["destination"].update(subset="canary"),
    "no pod is of the subset canary": lambda d: d[5]["spec"]["subsets"].append(
        {"name": "canary", "labels": {"track": "canary"}}
    ),
    "add up to 95": lambda d: d[6]["spec"]["http"][0]["route"][0].update(weight=95),
    "may run as root": lambda d: pod(d)["securityContext"].pop("runAsUser"),
    "token of the cluster": lambda d: pod(d).pop("automountServiceAccountToken"),
    "root file system is writable": lambda d: pod(d)["containers"][0]["securityContext"].update(readOnlyRootFilesystem=False),
    "gain privileges": lambda d: pod(d)["containers"][0]["securityContext"].pop("capabilities"),
    "memory has no limit": lambda d: pod(d)["containers"][0].update(resources={}),
    "no container has a readinessProbe": lambda d: pod(d)["containers"][0].pop("readinessProbe"),
    "readinessProbe asks port 81": lambda d: pod(d)["containers"][0]["readinessProbe"]["httpGet"].update(port=81),
    "mounts cache": lambda d: pod(d)["containers"][0]["volumeMounts"].append({"name": "cache", "mountPath": "/c"}),
    "container gateway: does not mount shm": lambda d: pod(d)["volumes"].append(
        {"name": "shm", "emptyDir": {"medium": "Memory"}}
    ),
    "at one path": lambda d: pod(d)["containers"][0]["volumeMounts"].append({"name": "live", "mountPath": "/srv"}),
    "PersistentVolumeClaim live-shop-1, which is neither": lambda d: job(d)["volumes"][0]["persistentVolumeClaim"].update(
        claimName="live-shop-1"
    ),
    "round: the pod may run as root": lambda d: job(d)["securityContext"].pop("runAsNonRoot"),
    "shop: the pod may run as root": lambda d: pod(d).pop("securityContext"),
    "shop: container gateway: its root file system is writable": lambda d: pod(d).update(
        volumes=[], containers=[{"name": "gateway", "ports": CONTAINER["ports"]}]
    ),
    "round: container gateway: its memory": lambda d: job(d)["containers"][0].update(resources={}),
    "Secret keys, which is neither": lambda d: pod(d)["volumes"][0]["secret"].update(secretName="keys"),
}


@pytest.mark.parametrize("message", BROKEN)
def test_each_fault_is_named(find_reference_faults, documents, message):
    BROKEN[message](documents)
    assert [fault for fault in find_reference_faults(documents) if message in fault]
