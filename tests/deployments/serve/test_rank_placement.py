"""Where the ranks of an engine run: what Serve is asked for, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.app import _engine_deployment
from deployments.config import AppConfig
from deployments.serve.rank_placement import placement_options, require_room
from engine.errors import ConfigError


def _parse(strategy: str, engine: dict[str, Any], **replicas: Any) -> AppConfig:
    return AppConfig.parse({"model": "m", "engine": engine, "replicas": {"placement_strategy": strategy, **replicas}})


def test_one_node_needs_no_placement_group() -> None:
    assert placement_options("STRICT_PACK", 2, 8.0, 2.0) == {"ray_actor_options": {"num_cpus": 8.0, "num_gpus": 2.0}}


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD"])
def test_each_rank_has_a_bundle(strategy: Any) -> None:
    options = placement_options(strategy, 4, 8.0, 4.0)
    assert options["placement_group_bundles"] == [{"CPU": 8.0, "GPU": 1.0}] * 4
    assert options["placement_group_strategy"] == strategy
    assert options["ray_actor_options"] == {"num_cpus": 8.0, "num_gpus": 1.0}
    on_cpus = placement_options(strategy, 2, 1.0, 0.0)
    assert on_cpus["placement_group_bundles"] == [{"CPU": 1.0}] * 2
    with pytest.raises(
        ConfigError, match=rf"{strategy} reserves CPUs or GPUs .*; raise args.replicas.cpus_per_engine=0"
    ):
        placement_options(strategy, 2, 0.0, 0.0)  # device: auto, and the cluster has no GPU


@pytest.mark.parametrize(
    ("engine", "replicas", "message"),
    [
        ({}, {}, "PACK places ranks, and engine.tensor_parallel_size is 1; raise that"),
        ({"tensor_parallel_size": 2, "kv_transfer": True}, {}, "several nodes, and engine.kv_transfer needs one"),
        (
            {"tensor_parallel_size": 2, "disk_cache_path": "/tmp/x"},
            {},
            "several nodes, and engine.disk_cache_path needs one",
        ),
        (
            {"tensor_parallel_size": 2, "device": "cpu"},
            {"cpus_per_engine": 0},
            "reserves .*; raise args.replicas.cpus_per_engine=0",
        ),
    ],
)
def test_what_does_not_fit_a_placement(engine: dict[str, Any], replicas: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _parse("PACK", engine, **replicas)


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"args\.replicas\.placement_strategy='pack': input should be 'STRICT_PACK', 'PACK' or 'SPREAD'",
    ):
        _parse("pack", {"tensor_parallel_size": 2})


def test_more_ranks_than_a_node_has_gpus() -> None:
    require_room("STRICT_PACK", 8.0, [8.0, 8.0], autoscales=False)
    require_room("STRICT_PACK", 8.0, [], autoscales=False)
    require_room("PACK", 16.0, [8.0, 8.0], autoscales=False)
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size=16 exceeds the 8 GPUs of the largest node; set .* PACK"
    ):
        require_room("STRICT_PACK", 16.0, [8.0, 4.0], autoscales=False)


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")  # which Ray reads itself
def test_an_autoscaling_cluster_may_add_larger_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.app._of_nodes", lambda _: [1.0])
    args: dict[str, Any] = {"model": "m", "engine": {"tensor_parallel_size": 2}, "autoscaling": {"max_replicas": 2}}
    deployment = _engine_deployment(AppConfig.parse(args))
    assert deployment.ray_actor_options == {"num_cpus": 0.5, "num_gpus": 2.0}
    args["autoscaling"] = {}
    with pytest.raises(ConfigError, match="the cluster has 1"):
        _engine_deployment(AppConfig.parse(args))
