"""WaitingReplicas, on details as Serve reports them."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.launcher import waiting as waiting_module
from deployments.launcher.waiting import Usage, WaitingReplicas, replica_ids, unplaced_replicas

CPUS = {"CPU": Usage(1.2, 2.0), "memory": Usage(0.0, 1e9)}


def _deployment(placed: int, unplaced: int, **needs: float) -> dict[str, Any]:
    replicas = [{"replica_id": f"placed{number}", "state": "RUNNING", "node_id": "n"} for number in range(placed)]
    replicas += [{"replica_id": f"waits{number}", "state": "STARTING", "node_id": None} for number in range(unplaced)]
    return {"target_num_replicas": placed + unplaced, "required_resources": needs, "replicas": replicas}


def _details(**deployments: dict[str, Any]) -> dict[str, Any]:
    return {"applications": {"pagoda": {"deployments": deployments}}}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which tests move on."""
    now = [1000.0]
    monkeypatch.setattr(waiting_module.time, "monotonic", lambda: now[0])
    return now


def _report(details: dict[str, Any], clock: list[float], usage: dict[str, Usage], after_s: float = 3.0) -> list[str]:
    watch = WaitingReplicas()
    assert not watch.update(details)
    clock[0] += after_s
    return watch.report(details, usage, "my.yaml") if watch.update(details) else []


def test_the_report_names_number_resource_and_remedy(clock: list[float]) -> None:
    details = _details(engine=_deployment(1, 3, CPU=1.0, GPU=0.0), ingress=_deployment(1, 0, CPU=0.2))
    assert _report(details, clock, CPUS) == [
        "3 of 4 engine replicas wait for CPU: each needs 1, the cluster has 2 and 0.8 are free; "
        "lower replicas.num_engine_replicas or replicas.cpus_per_engine in my.yaml, or use a larger cluster"
    ]


def test_gpus_that_the_cluster_does_not_have(clock: list[float]) -> None:
    (line,) = _report(_details(engine=_deployment(0, 2, CPU=0.5, GPU=1.0)), clock, CPUS)
    assert line == (
        "2 of 2 engine replicas wait for GPU: each needs 1, the cluster has 0 and 0 are free; "
        "lower replicas.num_engine_replicas in my.yaml, or use a larger cluster"
    )


def test_a_replica_for_which_there_is_room_is_only_late_after_a_minute(clock: list[float]) -> None:
    details = _details(ingress=_deployment(0, 1, CPU=0.2))
    assert _report(details, clock, CPUS, after_s=30.0) == []
    (line,) = _report(details, clock, CPUS, after_s=60.0)
    assert line.startswith("1 of 1 ingress replicas wait for a node")


def test_replicas_that_have_just_been_created_do_not_wait_yet(clock: list[float]) -> None:
    assert _report(_details(engine=_deployment(0, 1, CPU=4.0)), clock, CPUS, after_s=2.0) == []


def test_each_change_is_reported_once(clock: list[float]) -> None:
    watch = WaitingReplicas()
    details = _details(engine=_deployment(1, 3, CPU=1.0))
    watch.update(details)
    clock[0] += 5.0
    assert watch.update(details)
    assert len(watch.report(details, CPUS, "my.yaml")) == 1
    assert watch.report(details, CPUS, "my.yaml") == []
    assert len(watch.report(_details(engine=_deployment(2, 2, CPU=1.0)), CPUS, "my.yaml")) == 1


def test_it_knows_when_all_replicas_have_a_node() -> None:
    watch = WaitingReplicas()
    for details, are_placed in [
        ({}, False),  # the dashboard does not answer
        ({"applications": {"pagoda": {"status": "DEPLOYING"}}}, False),
        (_details(engine=_deployment(1, 1, CPU=1.0)), False),
        (_details(engine=_deployment(2, 0, CPU=1.0)), True),
    ]:
        watch.update(details)
        assert watch.are_placed is are_placed


def test_ids_of_replicas() -> None:
    details = _details(engine=_deployment(1, 2, CPU=1.0))
    assert replica_ids(details) == {"placed0", "waits0", "waits1"}
    assert unplaced_replicas(details) == {"waits0", "waits1"}
