"""k8s/README.md names options, metrics, paths and commands that exist."""

from __future__ import annotations

import re

import yaml

from deployments.observability.ingress_metrics import INGRESS_METRICS
from engine.observability.metrics import METRICS
from tests.k8s.crd import SCHEMAS
from tests.k8s.manifests import DEMO, K8S, ROOT, head, ray_service, serve_config
from tests.option_names import option_names

TEXT = (K8S / "README.md").read_text()
TABLE = TEXT[TEXT.index("## When the first token takes too long") :]
SECTIONS = ("replicas", "engine", "limits", "router", "autoscaling")


def test_every_option_in_the_table_exists() -> None:
    named = set(re.findall(rf"`(?:{'|'.join(SECTIONS)})\.\w+`", TEXT))
    assert len(named) > 15
    for option in named:
        section, key = option.strip("`").split(".")
        assert key in option_names(section), option


def test_every_metric_in_the_table_exists() -> None:
    known = {metric.name for metric in (*METRICS, *INGRESS_METRICS)}
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", TABLE)) - {"serve_config", "cache_salt"}
    assert len(named) > 12
    assert named <= known, named - known


def test_every_path_in_it_exists() -> None:
    paths = set(re.findall(r"(?:-k|-f|--file) (k8s/[\w./-]+)", TEXT))
    paths |= {f"k8s/{item}" for item in re.findall(r"`((?:base|overlays|components|model-loader)/[\w./-]*)`", TEXT)}
    assert len(paths) > 8
    for path in paths:
        assert (ROOT / path).exists(), path


def test_names_in_its_commands_are_those_of_the_manifests() -> None:
    service = ray_service(DEMO)["metadata"]
    assert f"rayservice/{service['name']}" in TEXT
    assert {f"{service['name']}-serve-svc", f"{service['name']}-head-svc"} <= set(re.findall(r"service/([\w-]+)", TEXT))
    assert set(re.findall(r"kubectl -n (\S+)", TEXT)) == {service["namespace"]}
    assert f'"model": "{serve_config(DEMO)["applications"][0]["args"]["model_name"]}"' in TEXT
    assert head(DEMO)["template"]["spec"]["containers"][0]["image"] in TEXT


def test_the_example_overlay_is_valid() -> None:
    (example,) = re.findall(r"# kustomization.yaml\n(.*?)```", TEXT, re.DOTALL)
    overlay = yaml.safe_load(example)
    assert overlay["images"][0]["name"] == "pagoda"
    assert all((K8S / "overlays" / path.removeprefix("../")).is_dir() for path in overlay["resources"])


def test_the_readme_names_the_version_of_the_schema() -> None:
    (version,) = re.findall(r"KubeRay\]\(\S+\) (\d+\.\d+\.\d+)", (SCHEMAS / "README.md").read_text())
    assert re.search(rf"KubeRay\s+{re.escape(version)}", TEXT)
    assert f"--version '~{version}'" in TEXT
