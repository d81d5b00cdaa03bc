"""docs/exposure.md lists what the manifests admit from outside Ray's pods, and every port that they declare."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.documents import ROOT, table_below
from tests.k8s.manifests import GPU, SERVING, Object, build, of_kind, pods

PAGE = ROOT / "docs/exposure.md"
RAYS_PODS, KUBELET = "Ray's pods", "the kubelet"
SOURCES = {
    "{'pagoda/clients': 'allowed'}": "namespaces with the label `pagoda/clients: allowed`",
    "{'app.kubernetes.io/name': 'prometheus'}": "Prometheus",
    "{'app.kubernetes.io/name': 'kuberay-operator'}": "KubeRay's operator",
    "['head', 'redis-cleanup']": "the head, and the job that deletes its entries",
}

Admission = tuple[str, int, str]  # the pod, its port, and who may connect to it


def _documented() -> set[Admission]:
    rows = table_below(PAGE, "Kubernetes")
    return {(pod, int(port.strip("`")), source) for names, port, source, *_ in rows for pod in names.split(", ")}


def _kind(pod: Object) -> str:
    labels = pod["metadata"]["labels"]
    return str(labels.get("ray.io/node-type") or labels["app.kubernetes.io/component"])


def _ports(pod: Object) -> set[int]:
    return {port["containerPort"] for item in pod["spec"]["containers"] for port in item.get("ports", ())}


def _source(peer: Object) -> str:
    """Return the page's words for who may connect."""
    matching = [words for part, words in SOURCES.items() if part in str(peer)]
    assert len(matching) == 1, f"the page has no words for {peer}"
    return matching[0]


def _admitted(overlay: str) -> Iterator[Admission]:
    """Yield what the policies admit at ports that pods declare; rules without ports are those between Ray's pods."""
    serving = [pod for pod in pods(overlay) if _kind(pod) in ("head", "worker", "redis")]
    for policy in of_kind(build(overlay), "NetworkPolicy"):
        wanted = policy["spec"]["podSelector"]["matchLabels"]
        for pod in (item for item in serving if wanted.items() <= item["metadata"]["labels"].items()):
            for rule in policy["spec"].get("ingress", ()):
                for port in {item["port"] for item in rule.get("ports", ())} & _ports(pod):
                    yield from ((_kind(pod), port, _source(peer)) for peer in rule["from"])


def _probed(overlay: str) -> Iterator[Admission]:
    for pod in pods(overlay):
        for item in pod["spec"]["containers"]:
            names = {port["name"]: port["containerPort"] for port in item.get("ports", ())}
            for probe in ("livenessProbe", "readinessProbe"):
                if port := item.get(probe, {}).get("httpGet", {}).get("port"):
                    yield _kind(pod), names.get(port, port), KUBELET


def test_the_page_lists_what_the_policies_admit() -> None:
    assert {item for item in _documented() if item[2] not in (RAYS_PODS, KUBELET)} == set(_admitted(GPU))


@pytest.mark.parametrize("overlay", SERVING)
def test_no_overlay_admits_more(overlay: str) -> None:
    assert set(_admitted(overlay)) <= _documented()


def test_the_page_lists_what_the_kubelet_probes() -> None:
    probed = {item for item in _probed(GPU) if item[0] in ("head", "worker")}
    assert {item for item in _documented() if item[2] == KUBELET} == probed


def test_the_page_lists_every_declared_port() -> None:
    declared = {(_kind(pod), port) for pod in pods(GPU) for port in _ports(pod) if _kind(pod) != "redis-cleanup"}
    listed = {item[:2] for item in _documented() if item[2] != KUBELET}
    for_probes_alone = {("worker", 8001)}
    assert listed == declared - for_probes_alone
    assert for_probes_alone <= declared & {item[:2] for item in _documented() if item[2] == KUBELET}
