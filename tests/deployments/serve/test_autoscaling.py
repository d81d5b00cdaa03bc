"""The autoscaling policy alone, and inside Serve's wrapper."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from deployments.serve.autoscaling import KVPressure, replica_pressure
from engine.observability.load import EngineLoad


def _load(**changes: Any) -> EngineLoad:
    values = {
        "num_running": 1,
        "num_waiting": 0,
        "queued_prefill_tokens": 0,
        "num_blocks": 100,
        "num_free_blocks": 100,
        "prefill_tokens_per_s": 2000.0,
        "num_steps": 5,
    }
    return EngineLoad(**(values | changes))


def _context(loads: list[EngineLoad], requests: float = 0.0, target: int | None = None, **config: Any) -> Any:
    metrics: dict[str, dict[str, float]] = {}
    for index, load in enumerate(loads):
        for name, value in replica_pressure(load).items():
            metrics.setdefault(name, {})[f"r{index}"] = value
    return SimpleNamespace(
        current_num_replicas=len(loads),
        target_num_replicas=len(loads) if target is None else target,
        aggregated_metrics=metrics,
        total_num_requests=requests,
        policy_state={},
        config=AutoscalingConfig(**({"min_replicas": 0, "max_replicas": 8} | config)),
    )


def test_replica_pressure_is_in_seconds_and_shares() -> None:
    pressure = replica_pressure(_load(queued_prefill_tokens=5000, num_free_blocks=25))
    assert pressure == {"queued_prefill_s": 2.5, "kv_usage": 0.75, "num_requests": 1}
    assert replica_pressure(_load(queued_prefill_tokens=5000, prefill_tokens_per_s=0.0))["queued_prefill_s"] > 0


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"queued_prefill_tokens": 4000}, 4),  # two seconds where one may be
        ({"num_free_blocks": 0}, 2.5),  # all in use where four fifths may be
        ({"queued_prefill_tokens": 1000, "num_free_blocks": 60}, 1),  # a quarter of the time: the KV blocks decide
        ({}, 1),  # idle but for one request
    ],
)
def test_the_greater_pressure_decides(changes: dict[str, Any], wanted: float) -> None:
    policy = KVPressure(target_queued_prefill_s=1.0, target_kv_usage=0.8)
    assert policy(_context([_load(**changes)] * 2))[0] == wanted


def test_long_prompts_count_more_than_many_requests() -> None:
    """Serve's own policy counts requests; one long prompt is more work than a hundred short ones."""
    policy = KVPressure()
    long = policy(_context([_load(num_waiting=1, queued_prefill_tokens=100_000)]))[0]
    short = policy(_context([_load(num_waiting=100, queued_prefill_tokens=1000)]))[0]
    assert long > 10 * short


def test_zero_replicas_only_without_requests() -> None:
    """Serve counts the calls of its handles only; the requests of the channel are in the replicas' reports."""
    policy, idle = KVPressure(), _load(num_running=0)
    assert policy(_context([idle]))[0] == 0
    assert policy(_context([idle], requests=1))[0] == 1
    assert policy(_context([idle, _load(num_running=0, num_waiting=1)]))[0] == 1
    assert policy(_context([_load()]))[0] == 1
    wrapped = _apply_autoscaling_config(policy)
    assert wrapped(_context([], requests=1))[0] == 1
    assert wrapped(_context([]))[0] == 0
    assert wrapped(_context([idle], downscale_delay_s=0.0))[0] == 0
    assert wrapped(_context([idle], downscale_delay_s=60.0))[0] == 1
    assert wrapped(_context([_load()], downscale_delay_s=0.0))[0] == 1


def test_serve_finds_and_builds_the_policy() -> None:
    config = AutoscalingPolicy(
        policy_function="deployments.serve.autoscaling:KVPressure", policy_kwargs={"target_queued_prefill_s": 3.0}
    )
    policy = config.get_policy()(**config.policy_kwargs)
    assert policy.target_queued_prefill_s == 3.0
    assert policy(_context([_load(queued_prefill_tokens=12_000)]))[0] == 2
