"""build_app: how many engines it lets onto the only node of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from deployments.app import build_app

NODE = {"Alive": True, "Resources": {"CPU": 2.0}}


def _max_per_node(monkeypatch: pytest.MonkeyPatch, model: Path, nodes: list[Any], **replicas: Any) -> int | None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "cluster_resources", dict)
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    application = build_app({"model": str(model), "replicas": replicas, "engine": {"device": "cpu"}})
    engine: Any = application._bound_deployment.init_args[0]
    number: int | None = engine._bound_deployment._replica_config.max_replicas_per_node
    return number


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ({"num_engine_replicas": 2, "cpus_per_engine": 0.5}, None),  # all fit
        ({"num_engine_replicas": 4, "cpus_per_engine": 1}, 1),  # two would leave nothing for the ingress
        ({"num_engine_replicas": 19, "cpus_per_engine": 0.1}, 18),
        ({"num_engine_replicas": 18, "cpus_per_engine": 0.1}, None),  # 1.8 / 0.1 is 18, in spite of rounding
        ({"num_engine_replicas": 4, "cpus_per_engine": 0.5, "num_ingress_replicas": 3, "cpus_per_ingress": 0.3}, 2),
        ({"num_engine_replicas": 2, "cpus_per_engine": 4}, None),  # none fits: the ingress starts anyway
        ({"num_engine_replicas": 9, "cpus_per_engine": 0}, None),
    ],
)
def test_engines_leave_room_for_the_ingresses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, replicas: dict[str, Any], expected: int | None
) -> None:
    head = {"Alive": True, "Resources": {"memory": 1e9}}
    dead = {"Alive": False, "Resources": {"CPU": 64.0}}
    assert _max_per_node(monkeypatch, tmp_path, [head, NODE, dead], **replicas) == expected


@pytest.mark.parametrize("nodes", [[], [NODE, NODE]])
def test_larger_clusters_are_not_limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: list[Any]) -> None:
    assert _max_per_node(monkeypatch, tmp_path, nodes, num_engine_replicas=9, cpus_per_engine=1) is None
