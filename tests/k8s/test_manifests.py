"""Every manifest: valid by Kubernetes' schemas, and with references to existing objects only.

Not checked: what only an API server or KubeRay's operator would say (rules in CEL, quotas, whether images and storage
classes exist), and that a network plugin does what a NetworkPolicy asks.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.k8s.manifests import APPLIED, GPU, K8S, MONITORING, SERVING, build, of_kind, pods, quantity, worker

VERSION = "1.34"
CUSTOM = ("ray.io/", "monitoring.coreos.com/")
OF_EVERY_CLUSTER = {"kube-root-ca.crt"}  # Kubernetes creates it in each namespace
README = (K8S / "README.md").read_text()
# No secret is in the tree: the README has the commands that create them, which give their names and keys.
SECRETS = dict(re.findall(r"create secret generic (\S+) .*?--from-(?:literal|file)=(\w[\w.-]*)=", README, re.DOTALL))

each = pytest.mark.parametrize("overlay", APPLIED)
serving = pytest.mark.parametrize("overlay", SERVING)


def _validate(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


@each
def test_manifests_are_valid_for_kubernetes(overlay: str) -> None:
    for item in build(overlay):
        if not item["apiVersion"].startswith(CUSTOM):
            _validate(item)
    for pod in pods(overlay):
        _validate(pod)


def test_a_mistake_in_a_pod_is_found() -> None:
    pod = copy.deepcopy(next(pods(GPU)))
    pod["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
        _validate(pod)


@each
def test_all_is_in_one_namespace(overlay: str) -> None:
    objects = build(overlay)
    assert {item["metadata"].get("namespace") for item in objects if item["kind"] != "Namespace"} == {"pagoda"}
    names = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(names) == len(set(names))


def _volumes(overlay: str) -> Iterator[dict[str, Any]]:
    for pod in pods(overlay):
        for volume in pod["spec"]["volumes"]:
            yield from volume["projected"]["sources"] if "projected" in volume else [volume]


@each
def test_objects_that_a_pod_references_are_defined(overlay: str) -> None:
    objects = [*build(overlay), *(build(GPU) if overlay not in SERVING else [])]  # the loader fills the GPU's volume
    defined = {
        kind: {item["metadata"]["name"] for item in of_kind(objects, kind)}
        for kind in ("ServiceAccount", "PersistentVolumeClaim", "ConfigMap")
    }
    for pod in pods(overlay):
        account = pod["spec"].get("serviceAccountName")
        assert account is None or account in defined["ServiceAccount"]
        assert pod["spec"]["automountServiceAccountToken"] is False
        for container in pod["spec"]["containers"]:
            own = {item["name"] for item in [*pod["spec"]["volumes"], *_claimed(objects)]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= own, container["name"]
    for volume in _volumes(overlay):
        if claim := volume.get("persistentVolumeClaim"):
            assert claim["claimName"] in defined["PersistentVolumeClaim"]
        if config := volume.get("configMap"):
            assert config["name"] in defined["ConfigMap"] | OF_EVERY_CLUSTER
        if secret := volume.get("secret"):
            assert secret["secretName"] in SECRETS
    for reference in _secret_keys(objects):
        assert SECRETS[reference["name"]] == reference["key"]


def _claimed(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sets = of_kind(objects, "StatefulSet")
    return [claim["metadata"] for item in sets for claim in item["spec"]["volumeClaimTemplates"]]


def _secret_keys(node: Any) -> Iterator[dict[str, str]]:
    if isinstance(node, dict):
        if "secretKeyRef" in node:
            yield node["secretKeyRef"]
        for value in node.values():
            yield from _secret_keys(value)
    elif isinstance(node, list):
        for value in node:
            yield from _secret_keys(value)


def test_secret_files_are_at_the_configured_paths() -> None:
    assert SECRETS == {"pagoda-api-keys": "keys", "pagoda-redis": "password"}
    (container,) = worker(GPU)["template"]["spec"]["containers"]
    (mount,) = [item for item in container["volumeMounts"] if item["name"] == "api-keys"]
    (variable,) = [item["value"] for item in container["env"] if item["name"] == "PAGODA_API_KEYS_FILE"]
    assert variable == f"{mount['mountPath']}/{SECRETS['pagoda-api-keys']}"


@each
def test_pods_keep_the_restricted_standard(overlay: str) -> None:
    for pod in pods(overlay):
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["spec"]["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, container["name"]
            assert any(item["mountPath"] in ("/tmp", "/models", "/run/redis") for item in container["volumeMounts"])
        kinds = {key for volume in pod["spec"]["volumes"] for key in volume if key != "name"}
        assert kinds <= {"emptyDir", "secret", "configMap", "projected", "persistentVolumeClaim"}


@each
def test_every_container_has_resource_requests(overlay: str) -> None:
    for pod in pods(overlay):
        for container in pod["spec"]["containers"]:
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            assert requests.keys() == limits.keys() >= {"cpu", "memory"}
            for name in requests:
                assert quantity(requests[name]) <= quantity(limits[name])
            assert container["imagePullPolicy"] == "IfNotPresent"
            assert container["name"] == "autoscaler" or re.fullmatch(r".+:(?!latest).+", container["image"])


def test_only_the_autoscaler_may_use_the_kubernetes_api() -> None:
    (leader,) = [pod for pod in pods(GPU) if pod["metadata"].get("labels", {}).get("ray.io/node-type") == "head"]
    holders = [
        container["name"]
        for container in leader["spec"]["containers"]
        if any(item["mountPath"].startswith("/var/run/secrets") for item in container["volumeMounts"])
    ]
    assert holders == ["autoscaler"]


def _selects(selector: dict[str, Any], pod: dict[str, Any]) -> bool:
    labels = pod["metadata"].get("labels", {})
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "In" for expression in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )


@serving
def test_policies_select_pods_and_name_ports_that_they_have(overlay: str) -> None:
    everything = list(pods(overlay))
    for policy in of_kind(build(overlay), "NetworkPolicy"):
        chosen = [pod for pod in everything if _selects(policy["spec"]["podSelector"], pod)]
        assert chosen, policy["metadata"]["name"]
        for rule in policy["spec"].get("ingress", []):
            targets = chosen
            for port in rule.get("ports", []):
                assert _listens(targets, port["port"]) or port["port"] == 44217, (policy["metadata"]["name"], port)
        for direction, peers in (("ingress", "from"), ("egress", "to")):
            for rule in policy["spec"].get(direction, []):
                for peer in rule[peers]:
                    if peer.keys() == {"podSelector"}:  # in our own namespace
                        assert any(_selects(peer["podSelector"], pod) for pod in everything)


def _listens(chosen: list[dict[str, Any]], port: int) -> bool:
    return any(
        item["containerPort"] == port
        for pod in chosen
        for container in pod["spec"]["containers"]
        for item in container.get("ports", [])
    )


@serving
def test_every_pod_of_a_cluster_is_denied_what_is_not_allowed(overlay: str) -> None:
    (deny,) = [
        item for item in of_kind(build(overlay), "NetworkPolicy") if item["metadata"]["name"] == "pagoda-deny-all"
    ]
    assert deny["spec"].keys() == {"podSelector", "policyTypes"}
    assert deny["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert all(_selects(deny["spec"]["podSelector"], pod) for pod in pods(overlay))


def test_the_budget_allows_evicting_one_worker() -> None:
    (budget,) = of_kind(build(GPU), "PodDisruptionBudget")
    selected = [pod for pod in pods(GPU) if _selects(budget["spec"]["selector"], pod)]
    assert {pod["metadata"]["labels"]["ray.io/node-type"] for pod in selected} == {"worker"}
    least = budget["spec"]["minAvailable"]  # a number: RayCluster has no scale subresource for percentages
    assert type(least) is int
    assert 0 < least < worker(GPU)["minReplicas"]


def _kustomizations() -> dict[Path, dict[str, Any]]:
    return {path.parent: yaml.safe_load(path.read_text()) for path in K8S.rglob("kustomization.yaml")}


def test_every_manifest_is_reached() -> None:
    reached = set()
    for directory, content in _kustomizations().items():
        for entry in [*content.get("resources", []), *content.get("components", [])]:
            path = (directory / entry).resolve()
            assert path.exists(), f"{directory}: {entry}"
            reached.add(path)
    manifests = {path for path in K8S.rglob("*.yaml") if path.name != "kustomization.yaml"}
    assert {path for path in manifests if MONITORING not in path.parents} <= reached
    for directory in _kustomizations():  # overlays that no other includes are for users, and the README names them
        is_for_users = f"k8s/{directory.relative_to(K8S)}" in README
        assert directory in reached or is_for_users or MONITORING in directory.parents, directory


def test_the_overlay_with_monitoring_is_the_gpu_overlay_and_more() -> None:
    monitored = build("overlays/gpu-monitored")
    assert all(item in monitored for item in build(GPU))
    assert {item["kind"] for item in monitored} >= {"PodMonitor", "PrometheusRule"}
