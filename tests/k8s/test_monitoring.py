"""The dashboard, the alerts and the PodMonitors: well formed, true to the code, and complete."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.k8s.monitoring_files import FOLDER, ROOT, Json, dashboard, label_queries, panels, queries, rules

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own modules warn while they are imported
    from deployments.observability.ingress_metrics import INGRESS_METRICS
    from k8s.monitoring import metrics_table
    from k8s.monitoring.dashboard import as_text
    from k8s.monitoring.dashboard import dashboard as written_by_source

from engine.observability.metrics import METRICS, Metric

SCHEMAS = Path(__file__).parent / "schemas"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
OF_KUBERNETES = {"namespace", "ray_io_cluster"}  # labels that PodMonitors add


# ---- the dashboard -----------------------------------------------------------------------------------------------


def test_the_dashboard_is_what_its_source_writes() -> None:
    text = (FOLDER / "dashboard.json").read_text()
    assert text == as_text(written_by_source()), "run python -m k8s.monitoring.dashboard"
    assert dashboard() == json.loads(json.dumps(written_by_source()))


def test_every_panel_has_a_description() -> None:
    assert len(panels()) > 25
    for panel in panels():
        title, defaults = panel["title"], panel["fieldConfig"]["defaults"]
        assert defaults["unit"], title
        assert len(panel["description"]) > 20, title
        assert panel["targets"], title
        assert all(target["legendFormat"] for target in panel["targets"]), title
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, title
        if panel["type"] == "timeseries":
            assert panel["options"]["legend"]["showLegend"], title
            assert panel["options"]["legend"]["calcs"], title
    assert len({panel["title"] for panel in panels()}) == len(panels())
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])


def test_panels_fill_the_width_and_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard()["panels"]:
        grid = panel["gridPos"]
        for x in range(grid["x"], grid["x"] + grid["w"]):
            for y in range(grid["y"], grid["y"] + grid["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies over {taken[x, y]}"
                taken[x, y] = panel["title"]
    height = 1 + max(y for _, y in taken)
    gaps = [(x, y) for x in range(24) for y in range(height) if (x, y) not in taken]
    assert not gaps
    assert max(x for x, _ in taken) == 23


def test_rows_and_variables() -> None:
    rows = [panel["title"] for panel in dashboard()["panels"] if panel["type"] == "row"]
    kv_cache = ["KV cache", "KV tiers"]
    assert rows == ["What users feel", "Throughput", "Speculative decoding", *kv_cache, "Routing", "Saturation"]
    names = [variable["name"] for variable in dashboard()["templating"]["list"]]
    assert {"datasource", "prefix", "model", "replica"} <= set(names)
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard()))) - {"__rate_interval", "__all"}
    assert used == set(names)


# ---- queried metrics exist -----------------------------------------------------------------------------------------


def _labels(metric: Metric, process: str, suffix: str) -> set[str]:
    return {*metric.labels, process, *OF_KUBERNETES, *(("le",) if suffix == "_bucket" else ())}


SERIES = {
    metric.name + suffix: _labels(metric, process, suffix)
    for process, metrics in (("replica", METRICS), ("ingress", INGRESS_METRICS))
    for metric in metrics
    for suffix in SUFFIXES[metric.kind]
}


def _check(expression: str) -> None:
    """Check that an expression's metrics exist, and that they have the labels that it matches and sums by."""
    names = re.findall(r"(?:\$\{prefix\}|ray_pagoda)_(\w+)", expression)
    assert names, expression
    assert set(names) <= SERIES.keys(), f"{set(names) - SERIES.keys()} in {expression}"
    for name, matchers in re.findall(r"(?:\$\{prefix\}|ray_pagoda)_(\w+)\{([^}]*)\}", expression):
        labels = re.findall(r"(\w+)(?:=~|!=|=)\"", matchers)
        assert labels
        assert set(labels) <= SERIES[name], expression
    for by in re.findall(r"by \(([^)]*)\)", expression):
        wanted = set(by.replace(" ", "").split(","))
        assert any(wanted <= SERIES[name] for name in names), f"no metric of {expression} has {wanted}"


@pytest.mark.parametrize(("title", "expression"), list(queries()))
def test_the_metrics_of_a_panel_exist(title: str, expression: str) -> None:
    _check(expression)
    assert "$replica" in expression or "$ingress" in expression, "it shows other models' replicas too"


@pytest.mark.parametrize(("name", "series", "label"), list(label_queries()))
def test_the_metrics_of_a_variable_exist(name: str, series: str, label: str) -> None:
    _check(series)
    metric = re.findall(r"\$\{prefix\}_(\w+)", series)[0]
    assert label in SERIES[metric]


def test_a_metric_that_does_not_exist_is_found() -> None:
    for wrong in (
        "rate(${prefix}_generated_tokens_total[1m])",
        'sum(${prefix}_replicas{replica="a"})',
        "sum by (kind) (rate(${prefix}_prompt_tokens_total[1m]))",
    ):
        with pytest.raises(AssertionError):
            _check(wrong)


# ---- the alerts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_has_a_summary_and_a_runbook(rule: Json) -> None:
    _check(rule["expr"])
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["for"]
    annotations = rule["annotations"]
    assert min(len(annotations["summary"]), len(annotations["description"])) > 20
    file, _, heading = annotations["runbook"].partition("#")
    text = (ROOT / file).read_text()
    assert heading in [line.lstrip("# ").lower() for line in text.splitlines() if line.startswith("#")]


def test_the_dashboards_threshold_is_the_alerts_objective() -> None:
    alert = next(rule["expr"] for rule in rules() if rule["alert"] == "PagodaTimeToFirstTokenHigh")
    panel = next(panel for panel in panels() if panel["title"] == "Time to first token")
    (line,) = [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"] if step["value"]]
    assert f"> {line}\n" in alert


def test_the_readmes_table_of_metrics_is_current() -> None:
    text = metrics_table.README.read_text()
    assert text == metrics_table.with_table(text), "run python -m k8s.monitoring.metrics_table"


# ---- the manifests -------------------------------------------------------------------------------------------------


def _strict(schema: Any) -> Any:
    """Return an OpenAPI schema that rejects unknown keys, as `kubectl apply` does by default."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    stricter = {key: _strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        stricter.setdefault("additionalProperties", False)
    return stricter


def _validator(kind: str) -> jsonschema.Draft4Validator:
    definition = yaml.safe_load((SCHEMAS / f"monitoring.coreos.com_{kind.lower()}s.yaml").read_text())
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    strict_schema = _strict(schema)
    strict_schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return jsonschema.Draft4Validator(strict_schema)


def _documents() -> list[Json]:
    files = [FOLDER / "podmonitors.yaml", FOLDER / "get-metrics" / "podmonitor.yaml", FOLDER / "prometheusrule.yaml"]
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


@pytest.mark.parametrize("document", _documents(), ids=lambda document: document["metadata"]["name"])
def test_a_manifest_is_valid(document: Json) -> None:
    assert document["apiVersion"] == "monitoring.coreos.com/v1"
    _validator(document["kind"]).validate(document)


def test_a_wrong_manifest_is_rejected() -> None:
    monitor, rule = _documents()[0], _documents()[-1]
    monitor["spec"]["podMetricsEndpoints"][0]["intervall"] = "15s"
    rule["spec"]["groups"][0]["rules"][0]["for"] = "a minute"
    for document in (monitor, rule):
        with pytest.raises(jsonschema.ValidationError):
            _validator(document["kind"]).validate(document)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
def test_kustomize_builds_the_folder(tmp_path: Path) -> None:
    component = FOLDER / "get-metrics"
    inside = tmp_path / "overlay"
    shutil.copytree(FOLDER, tmp_path / "monitoring")
    inside.mkdir()
    kustomization = {"resources": ["../monitoring"], "components": [f"../monitoring/{component.name}"]}
    (inside / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    manifests = subprocess.run(["kubectl", "kustomize", inside], check=True, capture_output=True, text=True).stdout
    documents = {(item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(manifests)}
    assert documents.keys() == {
        ("ConfigMap", "pagoda-dashboard"),
        ("PodMonitor", "pagoda-head"),
        ("PodMonitor", "pagoda-workers"),
        ("PodMonitor", "pagoda-ingress"),
        ("PrometheusRule", "pagoda"),
    }
    assert {document["metadata"]["namespace"] for document in documents.values()} == {"pagoda"}
    for (kind, _), document in documents.items():
        assert document["metadata"]["labels"]["release"] == "prometheus"
        if kind in ("PodMonitor", "PrometheusRule"):
            _validator(kind).validate(document)
    config = documents["ConfigMap", "pagoda-dashboard"]
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config["data"]["pagoda.json"]) == dashboard()
