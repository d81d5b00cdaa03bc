"""The RayServices: valid by the schemas of KubeRay, Ray and Pagoda, and with consistent numbers."""

from __future__ import annotations

import copy
import re
import tomllib
from typing import Any

import pytest
from ray.serve.schema import ServeDeploySchema

from deployments.config import AppConfig
from deployments.launcher.environment import SETTINGS
from deployments.proxy.limits import ProxyLimits
from deployments.proxy.probe_frontend import PORT_VARIABLE
from tests.k8s.crd import mistakes
from tests.k8s.manifests import DEMO, GPU, ROOT, SERVING, head, quantity, ray_service, serve_config, worker

CRD = "ray.io_rayservices.yaml.gz"
each = pytest.mark.parametrize("overlay", SERVING)


def _config(overlay: str) -> AppConfig:
    return AppConfig.parse(serve_config(overlay)["applications"][0]["args"])


def _container(group: dict[str, Any]) -> dict[str, Any]:
    (container,) = group["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def _environment(group: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["value"] for item in _container(group)["env"] if "value" in item}


@each
def test_the_rayservice_is_valid_for_kuberay(overlay: str) -> None:
    assert mistakes(CRD, ray_service(overlay)) == []


@pytest.mark.parametrize(
    ("path", "key", "value", "message"),
    [
        ("spec", "excludeHeadPodFromServeService", True, "'excludeHeadPodFromServeService' was unexpected"),
        ("spec.rayClusterConfig", "enableInTreeAutoscalling", True, "'enableInTreeAutoscalling' was unexpected"),
        ("spec.rayClusterConfig.headGroupSpec.template.spec", "container", [], "'container' was unexpected"),
        ("spec.rayClusterConfig.headGroupSpec.template.spec.securityContext", "runAsNonroot", True, "runAsNonroot"),
        ("spec.rayClusterConfig.authOptions", "mode", "tokens", "'tokens' is not one of"),
        ("spec.rayClusterConfig", "rayVersion", 2.60, "is not of type 'string'"),
        ("spec", "rayClusterDeletionDelaySeconds", -1, "less than the minimum"),
    ],
)
def test_a_mistake_in_the_rayservice_is_found(path: str, key: str, value: Any, message: str) -> None:
    service = copy.deepcopy(ray_service(DEMO))
    section = service
    for name in path.split("."):
        section = section[name]
    section[key] = value
    (mistake,) = mistakes(CRD, service)
    assert message in mistake


def test_a_duplicate_port_is_found() -> None:
    service = copy.deepcopy(ray_service(DEMO))
    ports = _container(service["spec"]["rayClusterConfig"]["headGroupSpec"])["ports"]
    ports.append(copy.deepcopy(ports[0]))
    assert any("is there twice" in item for item in mistakes(CRD, service))


@each
def test_the_serve_config_is_valid_for_ray_and_pagoda(overlay: str) -> None:
    document = serve_config(overlay)
    schema = ServeDeploySchema.model_validate(document)
    assert (schema.http_options.host, schema.http_options.port) == ("0.0.0.0", 8000)
    assert schema.proxy_location == "EveryNode"
    config = _config(overlay)
    assert config.engine_config.device == ("cuda" if overlay == GPU else "auto")


def test_a_model_on_gpus_has_no_limits_of_the_demo() -> None:
    engine = _config(GPU).engine_config
    assert (engine.kv_cache_memory, engine.max_num_seqs) == (None, 256)
    mounts = {
        item["mountPath"]: item["readOnly"] for item in _container(worker(GPU))["volumeMounts"] if "readOnly" in item
    }
    assert mounts["/models"] is True
    assert str(_config(GPU).model_path).startswith("/models/")


@each
def test_versions_are_those_of_the_project(overlay: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pinned,) = [item for item in project["dependencies"] if item.startswith("ray[")]
    version = ray_service(overlay)["spec"]["rayClusterConfig"]["rayVersion"]
    assert pinned == f"ray[serve]=={version.rpartition('.')[0]}.*"
    images = {_container(group)["image"] for group in (head(overlay), worker(overlay))}
    assert images == {f"pagoda:{project['version']}-{'gpu' if overlay == GPU else 'cpu'}"}


@each
def test_head_and_workers_have_the_same_fast_settings(overlay: str) -> None:
    leader, follower = _environment(head(overlay)), _environment(worker(overlay))
    assert {key: follower.get(key) for key in leader} == leader
    for name in (
        "RAY_SERVE_THROUGHPUT_OPTIMIZED",
        "RAY_SERVE_ENABLE_HA_PROXY",
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE",
        "TOKENIZERS_PARALLELISM",
    ):
        assert leader[name] == SETTINGS[name]
    for name in ("OMP_WAIT_POLICY", "RAY_worker_niceness"):  # of engines on CPUs
        assert overlay == GPU or leader[name] == SETTINGS[name]
    script = leader["RAY_SERVE_HAPROXY_BINARY_PATH"].removeprefix("/opt/pagoda/")
    assert (ROOT / script).stat().st_mode & 0o111


@each
def test_haproxy_has_the_limits_of_the_serve_config(overlay: str) -> None:
    expected = _config(overlay).limits.proxy
    for group in (head(overlay), worker(overlay)):
        environment = _environment(group)
        assert environment.keys() >= expected.environment.keys()
        assert ProxyLimits.from_environment(environment) == expected


@each
def test_ray_tokens_are_required_everywhere(overlay: str) -> None:
    cluster = ray_service(overlay)["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    for group in (head(overlay), worker(overlay)):
        assert (
            not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & _environment(group).keys()
        )  # KubeRay sets them unless they are set here
    assert head(overlay)["serviceType"] == "ClusterIP"
    assert _environment(worker(overlay))["PAGODA_API_KEYS_FILE"] == "/etc/pagoda/api-keys/keys"


@each
def test_a_terminating_pod_has_time_for_its_streams(overlay: str) -> None:
    limits = _config(overlay).limits
    pod = worker(overlay)["template"]["spec"]
    command = _container(worker(overlay))["lifecycle"]["preStop"]["exec"]["command"]
    timeout, killed_after, *program, option, seconds = command
    assert (timeout, program, option) == ("timeout", ["python", "-m", "deployments.drain"], "--seconds")
    # The drain's time covers Serve's reaction and the whole graceful shutdown of a replica.
    assert limits.graceful_shutdown_s + 30 <= int(seconds) < int(killed_after) < pod["terminationGracePeriodSeconds"]
    assert ray_service(overlay)["spec"]["rayClusterDeletionDelaySeconds"] >= limits.graceful_shutdown_s
    hard_stop = int(_environment(worker(overlay))["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"])
    assert hard_stop >= limits.request_timeout_s


@each
def test_probes_use_existing_paths_and_ports(overlay: str) -> None:
    for group in (head(overlay), worker(overlay)):
        assert _container(group)["livenessProbe"]["httpGet"] == {"path": "/api/healthz", "port": 52365}
    ports = {item["name"]: item["containerPort"] for item in _container(worker(overlay))["ports"]}
    assert _container(worker(overlay))["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": "probes"}
    assert _environment(worker(overlay))[PORT_VARIABLE] == str(ports["probes"])
    assert PORT_VARIABLE not in _environment(head(overlay))  # its own probes go elsewhere
    assert ports["serve"] == serve_config(overlay)["http_options"]["port"]
    assert ports["metrics"] == 8080
    leaders = {item["name"]: item["containerPort"] for item in _container(head(overlay))["ports"]}
    assert (
        leaders.items() >= {"serve": 8000, "dashboard": 8265, "metrics": 8080}.items()
    )  # KubeRay selects ports by name


@each
def test_the_applications_resources_fit_into_the_workers(overlay: str) -> None:
    config, group = _config(overlay), worker(overlay)
    replicas, resources = config.replicas, _container(group)["resources"]
    cpus = float(group["rayStartParams"].get("num-cpus", resources["limits"]["cpu"]))
    assert cpus <= quantity(resources["limits"]["cpu"])
    most = config.autoscaling.max_replicas or replicas.num_engine_replicas
    ingresses = replicas.num_ingress_replicas * replicas.cpus_per_ingress
    assert most * replicas.cpus_per_engine + ingresses <= cpus * group["maxReplicas"]
    at_start = replicas.num_engine_replicas * replicas.cpus_per_engine
    assert at_start + ingresses <= cpus * group["replicas"]
    gpus = int(resources["limits"].get("nvidia.com/gpu", 0))
    assert most * (replicas.gpus_per_engine or 0) == gpus * group["maxReplicas"]
    if config.autoscaling.max_replicas is not None:
        assert ray_service(overlay)["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] is True
        assert config.autoscaling.min_replicas * (replicas.gpus_per_engine or 0) == gpus * group["minReplicas"]


@each
def test_the_object_store_fits_into_shared_memory(overlay: str) -> None:
    for group in (head(overlay), worker(overlay)):
        (volume,) = [item for item in group["template"]["spec"]["volumes"] if item["name"] == "shm"]
        assert volume["emptyDir"]["medium"] == "Memory"
        size = quantity(volume["emptyDir"]["sizeLimit"])
        assert float(group["rayStartParams"]["object-store-memory"]) < size
        assert size < quantity(_container(group)["resources"]["limits"]["memory"])
        assert {"name": "shm", "mountPath": "/dev/shm"} in _container(group)["volumeMounts"]


@each
def test_the_head_runs_no_replica_and_serves_no_client(overlay: str) -> None:
    assert head(overlay)["rayStartParams"]["num-cpus"] == "0"
    assert ray_service(overlay)["spec"]["excludeHeadPodFromServeSvc"] is True


@each
def test_labels_leave_kuberays_services_their_pods(overlay: str) -> None:
    # The head service of a RayService selects by app.kubernetes.io/name=kuberay, which a template could override.
    for group in (head(overlay), worker(overlay)):
        labels = group["template"]["metadata"]["labels"]
        assert set(labels) == {"app.kubernetes.io/part-of", "app.kubernetes.io/component"}
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", ray_service(overlay)["metadata"]["name"])


def test_a_head_that_restarts_finds_its_state() -> None:
    options = ray_service(GPU)["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "pagoda-redis:6379"
    assert "externalStorageNamespace" not in options  # KubeRay's default differs per cluster, which is required
    assert "gcsFaultToleranceOptions" not in ray_service(DEMO)["spec"]["rayClusterConfig"]
