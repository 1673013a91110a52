"""Find broken references between Kubernetes documents (names, labels, ports), and pods that are not locked down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Document = dict[str, Any]
# Operators create these themselves, because they are secret or hold the shop's data (deploy/README.md).
EXTERNAL = {
    ("Secret", "recommender-tokens"),
    ("Secret", "recommender-metrics"),
    ("PersistentVolumeClaim", "recommender-models"),
    ("PersistentVolumeClaim", "recommender-models-canary"),
    ("PersistentVolumeClaim", "recommender-data"),
}
SERVING = ("StatefulSet", "Deployment", "Pod")
WORKLOADS = (*SERVING, "CronJob")


def find_reference_faults(documents: list[Document]) -> Iterator[str]:
    """Yield the faults of one rendered overlay."""
    known = {(each["kind"], each["metadata"]["name"]) for each in documents} | EXTERNAL | list_pod_claims(documents)
    pods = [(each["metadata"]["name"], *read_pod(each)) for each in documents if each["kind"] in WORKLOADS]
    for name, _, spec, claims in pods:
        yield from (f"{name}: {fault}" for fault in find_pod_faults(spec, claims, known))
    for each in documents:
        if each["kind"] in SERVING and not any("readinessProbe" in container for container in read_pod(each)[1]["containers"]):
            yield f"{each['metadata']['name']}: no container has a readinessProbe"
    for each in documents:
        name = f"{each['kind']} {each['metadata']['name']}"
        yield from (f"{name}: {fault}" for fault in find_selection_faults(each, pods))
        target = each["spec"].get("scaleTargetRef") if "spec" in each else None
        if target and (target["kind"], target["name"]) not in known:
            yield f"{name}: scales {target['kind']} {target['name']}, which does not exist"
        if target and any(is_named(other, target) and "replicas" in other["spec"] for other in documents):
            yield f"{name}: scales {target['kind']} {target['name']}, which states `replicas`: `kubectl apply` resets it"
    yield from find_route_faults(documents, pods)


def is_named(document: Document, target: dict[str, str]) -> bool:
    """Return whether a scaler's target is this document."""
    return (document["kind"], document["metadata"]["name"]) == (target["kind"], target["name"])


def list_pod_claims(documents: list[Document]) -> set[tuple[str, str]]:
    """Return (kind, name) of the volume claims that StatefulSets make: one for each template and stated replica."""
    return {
        ("PersistentVolumeClaim", f"{claim['metadata']['name']}-{each['metadata']['name']}-{number}")
        for each in documents
        if each["kind"] == "StatefulSet"
        for claim in each["spec"].get("volumeClaimTemplates", ())
        for number in range(each["spec"].get("replicas", 1))
    }


def read_pod(workload: Document) -> tuple[dict[str, str], dict[str, Any], set[str]]:
    """Return the labels of a workload's pods, their specification, and the names of the volumes they claim."""
    spec = workload["spec"]["jobTemplate"]["spec"] if workload["kind"] == "CronJob" else workload["spec"]
    template = workload if workload["kind"] == "Pod" else spec["template"]
    claims = {each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", ())}
    return template["metadata"]["labels"], template["spec"], claims


def find_pod_faults(spec: dict[str, Any], claims: set[str], known: set[tuple[str, str]]) -> Iterator[str]:
    """Yield the faults of a pod. claims: names of the volumes that it claims; known: (kind, name) of all existing objects"""
    volumes = {volume["name"] for volume in spec.get("volumes", ())} | claims
    for volume in spec.get("volumes", ()):
        for source, key, kind in (
            ("configMap", "name", "ConfigMap"),
            ("secret", "secretName", "Secret"),
            ("persistentVolumeClaim", "claimName", "PersistentVolumeClaim"),
        ):
            if source in volume and (kind, volume[source][key]) not in known:
                yield f"volume {volume['name']} is {kind} {volume[source][key]}, which is neither here nor in EXTERNAL"
    security = spec.get("securityContext", {})
    if not security.get("runAsNonRoot") or not security.get("runAsUser"):
        yield "the pod may run as root"
    if spec.get("automountServiceAccountToken", True):
        yield "the pod holds a token of the cluster's API"
    for container in [*spec.get("initContainers", ()), *spec["containers"]]:
        yield from (f"container {container['name']}: {fault}" for fault in find_container_faults(container, volumes))
    memory = {volume["name"] for volume in spec.get("volumes", ()) if volume.get("emptyDir", {}).get("medium") == "Memory"}
    for container in spec["containers"]:
        for name in sorted(memory - {mount["name"] for mount in container.get("volumeMounts", ())}):
            yield f"container {container['name']}: does not mount {name}, the memory that the pod's containers share"
    # a port belongs to the pod, so the probe of one container may use a port of another
    ports = {
        name for each in spec["containers"] for port in each.get("ports", ()) for name in (port["name"], port["containerPort"])
    }
    for container in spec["containers"]:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if (port := container.get(probe, {}).get("httpGet", {}).get("port")) and port not in ports:
                yield f"container {container['name']}: {probe} asks port {port}, which no container has"


def find_container_faults(container: dict[str, Any], volumes: set[str]) -> Iterator[str]:
    """Yield the faults of a container. volumes: names of the pod's volumes"""
    security = container.get("securityContext", {})
    if not security.get("readOnlyRootFilesystem"):
        yield "its root file system is writable"
    if security.get("allowPrivilegeEscalation", True) or "ALL" not in security.get("capabilities", {}).get("drop", ()):
        yield "it may gain privileges"
    if "memory" not in container.get("resources", {}).get("limits", {}):
        yield "its memory has no limit"
    mounts = container.get("volumeMounts", ())
    if len({mount["mountPath"] for mount in mounts}) < len(mounts):
        yield "two volumes are mounted at one path"
    for mount in mounts:
        if mount["name"] not in volumes:
            yield f"mounts {mount['name']}, which is not a volume of the pod"


def find_selection_faults(document: Document, pods: list) -> Iterator[str]:
    """Yield the labels and ports that a document selects and that no pod has. pods: (name, *result of read_pod) each"""
    spec = document.get("spec", {})
    selector = spec.get("podSelector" if document["kind"] == "NetworkPolicy" else "selector")
    if not selector or document["kind"] in WORKLOADS:
        return
    labels = selector.get("matchLabels", selector)
    selected_pods = [pod for _, pod_labels, pod, _ in pods if labels.items() <= pod_labels.items()]
    if not selected_pods:
        yield f"selects pods with the labels {labels}, which no pod has"
    pod_ports = {port["name"] for pod in selected_pods for each in pod["containers"] for port in each.get("ports", ())}
    stated_ports = {each["targetPort"] for each in spec.get("ports", ())}
    stated_ports |= {each["port"] for each in spec.get("podMetricsEndpoints", ())}
    stated_ports |= {each["port"] for rule in spec.get("ingress", ()) for each in rule["ports"]}
    yield from (f"names port {port}, which no container of these pods has" for port in sorted(stated_ports - pod_ports))


def find_route_faults(documents: list[Document], pods: list) -> Iterator[str]:
    """Yield routes to undefined subsets, shares that do not add up to 100, and subsets without pods."""
    services = {each["metadata"]["name"] for each in documents if each["kind"] == "Service"}
    subsets: set[tuple[str, str]] = set()
    for rule in (each["spec"] for each in documents if each["kind"] == "DestinationRule"):
        for subset in rule.get("subsets", ()):
            subsets.add((rule["host"], subset["name"]))
            if not any(subset["labels"].items() <= labels.items() for _, labels, _, _ in pods):
                yield f"DestinationRule: no pod is of the subset {subset['name']}"
    for routes in (each["spec"]["http"] for each in documents if each["kind"] == "VirtualService"):
        for route in routes:
            targets = [each["destination"] for each in route["route"]]
            for target in targets:
                if target["host"] not in services or (target["host"], target["subset"]) not in subsets:
                    yield f"VirtualService: {route['name']} goes to {target}, which does not exist"
            shares = [each["weight"] for each in route["route"] if "weight" in each]
            if shares and sum(shares) != 100:
                yield f"VirtualService: the shares of {route['name']} add up to {sum(shares)}"
