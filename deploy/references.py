"""Find references between Kubernetes documents that lead nowhere (names, labels, ports), and pods that are not locked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Document = dict[str, Any]
# What people make by hand, because it is a secret or holds the shop's data (deploy/README.md).
EXTERNAL = {
    ("Secret", "recommender-tokens"),
    ("Secret", "recommender-metrics"),
    ("PersistentVolumeClaim", "recommender-models"),
    ("PersistentVolumeClaim", "recommender-models-canary"),
    ("PersistentVolumeClaim", "recommender-data"),
}
SERVING = ("StatefulSet", "Deployment", "Pod")
WORKLOADS = (*SERVING, "CronJob")


def reference_faults(documents: list[Document]) -> Iterator[str]:
    """Yield the faults of one rendered overlay."""
    known = {(each["kind"], each["metadata"]["name"]) for each in documents} | EXTERNAL | claims_of_pods(documents)
    pods = [(each["metadata"]["name"], *pod_of(each)) for each in documents if each["kind"] in WORKLOADS]
    for name, _, spec, claims in pods:
        yield from (f"{name}: {fault}" for fault in pod_faults(spec, claims, known))
    for each in documents:
        if each["kind"] in SERVING and not any("readinessProbe" in container for container in pod_of(each)[1]["containers"]):
            yield f"{each['metadata']['name']}: no container has a readinessProbe"
    for each in documents:
        name = f"{each['kind']} {each['metadata']['name']}"
        yield from (f"{name}: {fault}" for fault in selection_faults(each, pods))
        target = each["spec"].get("scaleTargetRef") if "spec" in each else None
        if target and (target["kind"], target["name"]) not in known:
            yield f"{name}: scales {target['kind']} {target['name']}, which is not there"
    yield from route_faults(documents, pods)


def claims_of_pods(documents: list[Document]) -> set[tuple[str, str]]:
    """Return the claims that StatefulSets make for the pods that they always have."""
    return {
        ("PersistentVolumeClaim", f"{claim['metadata']['name']}-{each['metadata']['name']}-{number}")
        for each in documents
        if each["kind"] == "StatefulSet"
        for claim in each["spec"].get("volumeClaimTemplates", ())
        for number in range(each["spec"].get("replicas", 1))
    }


def pod_of(workload: Document) -> tuple[dict[str, str], dict[str, Any], set[str]]:
    """Return labels, specification and names of the claimed volumes of a workload's pods."""
    spec = workload["spec"]["jobTemplate"]["spec"] if workload["kind"] == "CronJob" else workload["spec"]
    template = workload if workload["kind"] == "Pod" else spec["template"]
    claims = {each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", ())}
    return template["metadata"]["labels"], template["spec"], claims


def pod_faults(spec: dict[str, Any], claims: set[str], known: set[tuple[str, str]]) -> Iterator[str]:
    volumes = {volume["name"] for volume in spec["volumes"]} | claims
    for volume in spec["volumes"]:
        for source, key, kind in (
            ("configMap", "name", "ConfigMap"),
            ("secret", "secretName", "Secret"),
            ("persistentVolumeClaim", "claimName", "PersistentVolumeClaim"),
        ):
            if source in volume and (kind, volume[source][key]) not in known:
                yield f"volume {volume['name']} is {kind} {volume[source][key]}, which is neither here nor made by hand"
    if not spec["securityContext"].get("runAsNonRoot") or not spec["securityContext"].get("runAsUser"):
        yield "the pod may run as root"
    if spec.get("automountServiceAccountToken", True):
        yield "the pod holds a token of the cluster's API"
    for container in [*spec.get("initContainers", ()), *spec["containers"]]:
        yield from (f"container {container['name']}: {fault}" for fault in container_faults(container, volumes))
    # a port belongs to the pod, so a probe of one container may ask another
    ports = {
        name for each in spec["containers"] for port in each.get("ports", ()) for name in (port["name"], port["containerPort"])
    }
    for container in spec["containers"]:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if (port := container.get(probe, {}).get("httpGet", {}).get("port")) and port not in ports:
                yield f"container {container['name']}: {probe} asks port {port}, which no container has"


def container_faults(container: dict[str, Any], volumes: set[str]) -> Iterator[str]:
    locks = container.get("securityContext", {})
    if not locks.get("readOnlyRootFilesystem"):
        yield "its root is writable"
    if locks.get("allowPrivilegeEscalation", True) or "ALL" not in locks.get("capabilities", {}).get("drop", ()):
        yield "it may gain privileges"
    if "memory" not in container.get("resources", {}).get("limits", {}):
        yield "its memory has no limit"
    paths = [mount["mountPath"] for mount in container["volumeMounts"]]
    if len(set(paths)) < len(paths):
        yield "two volumes are mounted at one path"
    for mount in container["volumeMounts"]:
        if mount["name"] not in volumes:
            yield f"mounts {mount['name']}, which is no volume of the pod"


def selection_faults(document: Document, pods: list) -> Iterator[str]:
    """Yield what a selector, or a service's port, does not find."""
    spec = document.get("spec", {})
    selector = spec.get("podSelector" if document["kind"] == "NetworkPolicy" else "selector")
    if not selector or document["kind"] in WORKLOADS:
        return
    labels = selector.get("matchLabels", selector)
    chosen = [pod for _, own, pod, _ in pods if labels.items() <= own.items()]
    if not chosen:
        yield f"selects pods labelled {labels}, and no pod is"
    named = {port["name"] for pod in chosen for each in pod["containers"] for port in each.get("ports", ())}
    asked = {each["targetPort"] for each in spec.get("ports", ())}
    asked |= {each["port"] for each in spec.get("podMetricsEndpoints", ())}
    asked |= {each["port"] for rule in spec.get("ingress", ()) for each in rule["ports"]}
    yield from (f"names port {port}, which no container of these pods has" for port in sorted(asked - named))


def route_faults(documents: list[Document], pods: list) -> Iterator[str]:
    """Yield the routes to subsets that nobody defined, shares that do not add up, and subsets without pods."""
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
                    yield f"VirtualService: {route['name']} goes to {target}, which is not there"
            shares = [each["weight"] for each in route["route"] if "weight" in each]
            if shares and sum(shares) != 100:
                yield f"VirtualService: the shares of {route['name']} add up to {sum(shares)}"
