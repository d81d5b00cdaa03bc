"""How many GPUs Ray reserves for an engine replica, and which configured numbers are refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from deployments.config import AppConfig
from engine.errors import ConfigError
from tests.waiting import HANG_S

CACHE = {"kv_cache_memory": "64MiB"}


def _config(
    engine: dict[str, Any], engines: int = 2, *, gpus: float | None = None, most: int | None = None
) -> AppConfig:
    replicas = {"num_engine_replicas": engines, "gpus_per_engine": gpus}
    return AppConfig.parse(
        {"model": "m", "engine": engine, "replicas": replicas, "autoscaling": {"max_replicas": most}}
    )


@pytest.mark.parametrize(
    ("engine", "engines", "available", "expected"),
    [
        ({}, 2, 0, 0.0),
        ({"device": "cpu"}, 2, 8, 0.0),
        ({}, 2, 8, 1.0),
        ({"device": "cuda"}, 2, 0, 1.0),
        ({"tensor_parallel_size": 2}, 2, 4, 2.0),
        (CACHE, 2, 1, 0.5),
        (CACHE, 3, 1, 0.3333),
        (CACHE, 3, 2, 0.5),  # two on one of them: 0.66 would leave the third without any
    ],
)
def test_default_number_of_gpus(engine: dict[str, Any], engines: int, available: float, expected: float) -> None:
    assert _config(engine, engines).gpus_per_engine(available) == expected


def test_autoscaled_replicas_get_a_gpu_each_because_nodes_are_added() -> None:
    assert _config({}, 4, most=8).gpus_per_engine(2) == 1.0
    assert _config(CACHE, 4, most=8).gpus_per_engine(2) == 1.0


@pytest.mark.parametrize(
    ("engine", "engines", "available", "message"),
    [
        ({}, 4, 2, "setting engine.kv_cache_memory"),
        ({"num_blocks": 9}, 20_000, 1, "lower it"),
        (CACHE | {"tensor_parallel_size": 2}, 2, 3, "need 4 GPUs and the cluster has 3"),
        (CACHE | {"tensor_parallel_size": 2}, 1, 1, "each rank needs a whole GPU"),  # half a GPU fits no two ranks
    ],
)
def test_too_few_gpus(engine: dict[str, Any], engines: int, available: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _config(engine, engines).gpus_per_engine(available)


@pytest.mark.parametrize(
    ("engine", "gpus"),
    [
        ({}, 1),
        ({"device": "cuda", "tensor_parallel_size": 2}, 2),
        (CACHE, 0.5),
        ({"num_blocks": 9}, 0.0001),
        ({"device": "cpu"}, 0),
        ({"device": "cpu", "tensor_parallel_size": 2}, 0),
    ],
)
def test_a_configured_number_of_gpus_is_taken(engine: dict[str, Any], gpus: float) -> None:
    for available in (0, 1, 8):
        assert _config(engine, gpus=gpus).gpus_per_engine(available) == gpus


@pytest.mark.parametrize(
    ("engine", "gpus", "message"),
    [
        (
            {},
            0.5,
            "gpus_per_engine=0.5 lets engines share a GPU.*set engine.kv_cache_memory, .* or set gpus_per_engine to 1",
        ),
        ({"gpu_memory_utilization": 0.4}, 0.5, "gpus_per_engine=0.5 .*gpu_memory_utilization counts the memory of all"),
        (CACHE, 0.00004, "gpus_per_engine=4e-05 .*at least 0.0001"),
        (CACHE, 1.5, "gpus_per_engine=1.5 must equal .*size=1; set it to 1, or to less than 1 to share"),
        ({}, 2, "gpus_per_engine=2 must equal .*size=1; set it to 1"),
        (CACHE | {"tensor_parallel_size": 2}, 0.5, "gpus_per_engine=0.5 must equal .*size=2; set it to 2: each rank"),
        (CACHE | {"tensor_parallel_size": 2}, 1, "gpus_per_engine=1 must equal .*size=2; set it to 2"),
        ({"tensor_parallel_size": 2}, 3, "gpus_per_engine=3 must equal .*size=2"),
        ({"device": "cuda"}, 0, "gpus_per_engine=0 reserves no GPU for engine.device='cuda'; leave it out"),
        ({"device": "cpu"}, 1, "gpus_per_engine=1 reserves GPUs that engine.device='cpu' does not use; leave it out"),
        (CACHE | {"device": "cpu"}, 0.5, "gpus_per_engine=0.5 reserves GPUs that engine.device='cpu' does not use"),
    ],
)
@pytest.mark.parametrize("most", [None, 8])
def test_a_number_of_gpus_that_cannot_work(engine: dict[str, Any], gpus: float, message: str, most: int | None) -> None:
    with pytest.raises(ConfigError, match=rf"^args\.replicas\.{message}"):
        _config(engine, gpus=gpus, most=most)


def test_an_engine_without_a_reserved_gpu_runs_on_the_cpu() -> None:
    assert _config({}, gpus=0).engine_config.device == "cpu"
    assert _config({}).engine_config.device == "auto"


def test_the_decision_needs_neither_ray_nor_torch() -> None:
    modules = "sys, deployments.serve.gpu_share, deployments.config"
    program = f"import {modules}; print({{'ray', 'torch'}} & set(sys.modules) or 'neither')"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert answer.stdout == "neither\n"
