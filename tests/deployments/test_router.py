"""PrefixRouter with Serve's own base class and small fakes of replicas and requests."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve._private.request_router.common import RequestRoutingContext
from ray.serve.request_router import RequestRouter

from deployments.router import PrefixRouter
from deployments.routing import routing_state

DEPLOYMENT = DeploymentID(name="engine-of-test", app_name="test")


@dataclass
class FakeReplica:
    name: str
    queue_len: int = 0
    max_ongoing_requests: int = 8

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(unique_id=self.name, deployment_id=DEPLOYMENT)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue_len


@dataclass
class FakeRequest:
    kwargs: dict[str, Any]
    routing_context: RequestRoutingContext = field(default_factory=RequestRoutingContext)
    metadata: Any = field(default_factory=lambda: SimpleNamespace(internal_request_id="the same for all"))


@pytest.fixture
async def router() -> PrefixRouter:
    routing_state.cache_clear()
    made = PrefixRouter(
        DEPLOYMENT, DeploymentHandleSource.REPLICA, self_actor_id="ingress", use_replica_queue_len_cache=True
    )
    made.initialize_state(load_bound=1.25, load_slack=2, max_index_blocks=100)
    made.update_replicas([FakeReplica(name) for name in ("a", "b", "c")])  # type: ignore[misc]
    await asyncio.sleep(0.01)  # the probes of the queue lengths
    return made


async def _choose(router: PrefixRouter, **kwargs: Any) -> list[str]:
    request = FakeRequest(kwargs)
    ranks = await router.choose_replicas(list(router.curr_replicas.values()), request)  # type: ignore[arg-type]
    assert request.routing_context.should_backoff
    return [replica.replica_id.unique_id for tier in ranks for replica in tier]


async def test_a_prefix_returns_to_where_it_went(router: PrefixRouter) -> None:
    hashes = [1, 2, 3]
    first = (await _choose(router, block_hashes=hashes))[0]
    router.on_request_routed(FakeRequest({"block_hashes": hashes}), _id(first), None)  # type: ignore[arg-type]
    for tail in range(20):
        assert (await _choose(router, block_hashes=[*hashes, 100 + tail]))[0] == first


async def test_a_burst_spills_over_when_the_bound_is_reached(router: PrefixRouter) -> None:
    sent: dict[str, int] = {"a": 0, "b": 0, "c": 0}
    for _ in range(30):
        first = (await _choose(router, block_hashes=[1]))[0]
        router.on_send_request(_id(first))
        router.on_request_routed(FakeRequest({"block_hashes": [1]}), _id(first), None)  # type: ignore[arg-type]
        sent[first] += 1
    assert max(sent.values()) <= 1.25 * 10 + 2 + 1
    assert sum(router.state.in_flight.values()) == 30
    for name, number in sent.items():
        for _ in range(number):
            router.on_request_completed(_id(name), "id")
    assert not router.state.in_flight


async def test_avoided_replicas_are_left_out_unless_nothing_else_is_there(router: PrefixRouter) -> None:
    assert "a" not in await _choose(router, block_hashes=[1], avoid=["a"])
    assert sorted(await _choose(router, block_hashes=[1], avoid=["a", "b", "c"])) == ["a", "b", "c"]


async def test_calls_that_share_a_request_id_all_get_a_replica(router: PrefixRouter) -> None:
    """A list of prompts is several calls of one HTTP request; Serve's own matching would leave all but one waiting."""
    requests = [FakeRequest({"block_hashes": [number]}) for number in range(16)]
    chosen = await asyncio.wait_for(
        asyncio.gather(*(router._choose_replica_for_request(request) for request in requests)),  # type: ignore[arg-type]
        timeout=5,
    )
    assert all(replica.replica_id.unique_id in "abc" for replica in chosen)


async def test_a_full_replica_is_not_chosen(router: PrefixRouter) -> None:
    hashes = [1]
    first = (await _choose(router, block_hashes=hashes))[0]
    router.curr_replicas[_id(first)].queue_len = 8  # type: ignore[attr-defined]
    router.on_new_queue_len_info(_id(first), 8)
    request: Any = FakeRequest({"block_hashes": hashes})
    assert (await router._choose_replica_for_request(request)).replica_id.unique_id != first


async def test_a_dead_replica_is_forgotten(router: PrefixRouter) -> None:
    router.on_request_routed(FakeRequest({"block_hashes": [5]}), _id("b"), None)  # type: ignore[arg-type]
    router.on_replica_actor_died(_id("b"))
    assert routing_state(DEPLOYMENT.name).replicas == {"a", "c"}
    assert len(routing_state(DEPLOYMENT.name).index) == 0


def test_what_we_use_of_serves_private_parts_is_still_there() -> None:
    for name in ("_choose_replicas_with_backoff", "_select_from_candidate_replicas", "_choose_replica_for_request"):
        assert inspect.isfunction(getattr(RequestRouter, name))


def _id(name: str) -> ReplicaID:
    return ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)
