"""PrefixRouter with Serve's own base class and small fakes of replicas and requests."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve._private.request_router.common import RequestRoutingContext
from ray.serve.handle import DeploymentBroadcastResponse
from ray.serve.request_router import RequestRouter

from deployments.routing.cluster_view import cluster_view
from deployments.serve.router import PrefixRouter
from tests.waiting import HANG_S, until_in_loop

DEPLOYMENT = DeploymentID(name="engine-of-test", app_name="test")


@dataclass
class FakeReplica:
    name: str
    queue_len: int = 0
    max_ongoing_requests: int = 8
    replica_metadata: dict[str, Any] = field(default_factory=lambda: {"block_size": 4})

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(unique_id=self.name, deployment_id=DEPLOYMENT)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue_len


@dataclass
class FakeRequest:
    """A call of a method without arguments."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    routing_context: RequestRoutingContext = field(default_factory=RequestRoutingContext)
    metadata: Any = field(default_factory=lambda: SimpleNamespace(internal_request_id="the same for all"))


@pytest.fixture
async def router() -> PrefixRouter:
    cluster_view.cache_clear()
    started = PrefixRouter(
        DEPLOYMENT, DeploymentHandleSource.REPLICA, self_actor_id="ingress", use_replica_queue_len_cache=True
    )
    started.initialize_state(first_token_weight=9.0)
    started.update_replicas([FakeReplica(name) for name in ("a", "b", "c")])  # type: ignore[misc]
    lengths = started.replica_queue_len_cache
    await until_in_loop(lambda: all(lengths.get(_id(name)) == 0 for name in "abc"), "the queue lengths are known")
    return started


async def _send(router: PrefixRouter) -> str:
    """Route a call as Serve does; returns the replica."""
    return (await router._choose_replica_for_request(FakeRequest())).replica_id.unique_id  # type: ignore[arg-type]


async def test_a_call_goes_to_a_replica_that_is_not_full(router: PrefixRouter) -> None:
    for name in "ac":
        router.curr_replicas[_id(name)].queue_len = 8  # type: ignore[attr-defined]
        router.on_new_queue_len_info(_id(name), 8)
    assert [await _send(router) for _ in range(5)] == ["b"] * 5
    assert router.view.queued() == (0, 0)


async def test_while_all_are_full_serve_waits_before_it_asks_again(router: PrefixRouter) -> None:
    request: Any = FakeRequest()
    await router.choose_replicas(list(router.curr_replicas.values()), request)
    assert request.routing_context.should_backoff


async def test_calls_that_share_a_request_id_all_get_a_replica(router: PrefixRouter) -> None:
    """Serve's own matching would leave all but one waiting."""
    chosen = await asyncio.wait_for(asyncio.gather(*(_send(router) for _ in range(8))), timeout=HANG_S)
    assert set(chosen) <= set("abc")


async def test_a_dead_replica_is_forgotten(router: PrefixRouter) -> None:
    router.view.routing.stored("b", [5])
    router.on_replica_actor_died(_id("b"))
    assert router.view.routing.table.by_name.keys() == {"a", "c"}
    assert len(router.view.routing.index) == 0


async def test_the_views_watcher_gets_the_replicas_and_their_metadata(router: PrefixRouter) -> None:
    seen: list[Mapping[str, Mapping[str, Any]]] = []
    router.view.watch(lambda metadata: seen.append(dict(metadata)))
    router.update_replicas([FakeReplica("d", replica_metadata={"channel_secret": "x"})])  # type: ignore[list-item]
    router.on_replica_actor_died(_id("d"))
    assert seen == [{name: {"block_size": 4} for name in "abc"}, {"d": {"channel_secret": "x"}}, {}]


async def test_the_block_size_and_the_options_reach_the_view(router: PrefixRouter) -> None:
    assert router.view.routing.block_size == 4
    assert router.view.routing.table.options.first_token_weight == 9.0


def test_the_private_parts_of_serve_that_we_use_exist() -> None:
    for name in ("_choose_replicas_with_backoff", "_select_from_candidate_replicas", "_choose_replica_for_request"):
        assert inspect.isfunction(getattr(RequestRouter, name))
    assert inspect.iscoroutinefunction(DeploymentBroadcastResponse._fetch_replica_results_async)


def _id(name: str) -> ReplicaID:
    return ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)
