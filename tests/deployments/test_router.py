"""PrefixRouter with Serve's own base class and small fakes of replicas and requests."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve._private.request_router.common import RequestRoutingContext
from ray.serve.handle import DeploymentBroadcastResponse
from ray.serve.request_router import RequestRouter

from deployments.router import PrefixRouter
from deployments.routing.cluster_view import cluster_view
from engine.observability.load import EngineLoad
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

DEPLOYMENT = DeploymentID(name="engine-of-test", app_name="test")
IDLE = EngineLoad(
    num_running=0,
    num_waiting=0,
    queued_prefill_tokens=0,
    num_blocks=100,
    num_free_blocks=100,
    prefill_tokens_per_s=1000.0,
    decode_step_s=0.01,
    num_steps=1,
)


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
    """A call of ``generate`` with so many blocks of prompt, or of another method."""

    kwargs: dict[str, Any]
    args: tuple[Any, ...] = ()
    routing_context: RequestRoutingContext = field(default_factory=RequestRoutingContext)
    metadata: Any = field(default_factory=lambda: SimpleNamespace(internal_request_id="the same for all"))


def _generate(name: str, hashes: list[int], avoid: tuple[str, ...] = ()) -> Any:
    request = EngineRequest(name, [1] * (4 * len(hashes) + 1), SamplingParams())
    return FakeRequest({"block_hashes": hashes, "avoid": avoid}, (request,))


@pytest.fixture
async def router() -> PrefixRouter:
    cluster_view.cache_clear()
    made = PrefixRouter(
        DEPLOYMENT, DeploymentHandleSource.REPLICA, self_actor_id="ingress", use_replica_queue_len_cache=True
    )
    made.initialize_state(load_bound=1.25)
    made.update_replicas([FakeReplica(name) for name in ("a", "b", "c")])  # type: ignore[misc]
    await asyncio.sleep(0.01)  # the probes of the queue lengths
    for name in "abc":
        made.view.routing.report(name, IDLE, now=time.monotonic())
    return made


async def _send(router: PrefixRouter, request: Any) -> str:
    """Route a request as Serve does; returns the replica."""
    if request.args:
        router.view.begin(request.args[0].request_id)
    return (await router._choose_replica_for_request(request)).replica_id.unique_id


async def _order(router: PrefixRouter, request: Any) -> list[str]:
    ranks = await router.choose_replicas(list(router.curr_replicas.values()), request)
    assert request.routing_context.should_backoff
    return [replica.replica_id.unique_id for tier in ranks for replica in tier]


async def test_a_prefix_goes_to_the_replica_that_caches_it(router: PrefixRouter) -> None:
    router.view.routing.stored("b", [1, 2, 3])
    for tail in range(5):
        assert (await _order(router, _generate("x", [1, 2, 3, 100 + tail])))[0] == "b"


async def test_a_request_counts_before_its_kv_events_arrive(router: PrefixRouter) -> None:
    long = list(range(100))
    first = await _send(router, _generate("first", long))
    assert await _send(router, _generate("the same again", long)) == first
    assert await _send(router, _generate("another", [7])) != first  # it would queue after a long prompt
    assert router.view.queued()[0] == 3


async def test_a_request_counts_until_it_ends(router: PrefixRouter) -> None:
    where = Counter([await _send(router, _generate(f"r{number}", [10 + number])) for number in range(30)])
    assert max(where.values()) <= 1.25 * 10 + 1
    assert sorted(where) == ["a", "b", "c"]
    assert router.view.queued()[0] == 30
    for number in range(30):
        router.view.end(f"r{number}")
    assert router.view.queued() == (0, 0)


async def test_avoided_replicas_come_last(router: PrefixRouter) -> None:
    router.view.routing.stored("a", [1])
    assert (await _order(router, _generate("x", [1], avoid=("a",))))[-1] == "a"
    assert sorted(await _order(router, _generate("x", [1], avoid=("a", "b", "c")))) == ["a", "b", "c"]


async def test_a_call_without_a_prompt_goes_somewhere(router: PrefixRouter) -> None:
    assert await _send(router, FakeRequest({})) in "abc"
    assert sorted(await _order(router, FakeRequest({}))) == ["a", "b", "c"]
    assert router.view.queued() == (0, 0)


async def test_calls_that_share_a_request_id_all_get_a_replica(router: PrefixRouter) -> None:
    """A list of prompts is several calls of one HTTP request; Serve's own matching would leave all but one waiting."""
    requests = [_generate(f"r{number}", [number]) for number in range(16)]
    chosen = await asyncio.wait_for(asyncio.gather(*(_send(router, request) for request in requests)), timeout=5)
    assert set(chosen) <= set("abc")


async def test_a_full_replica_is_not_chosen(router: PrefixRouter) -> None:
    router.view.routing.stored("b", [1])
    router.curr_replicas[_id("b")].queue_len = 8  # type: ignore[attr-defined]
    router.on_new_queue_len_info(_id("b"), 8)
    assert await _send(router, _generate("x", [1])) != "b"


async def test_the_view_lists_recently_routed_requests(router: PrefixRouter) -> None:
    router.view.routing.stored("b", [1, 2])
    await _send(router, _generate("x", [1, 2, 3]))
    await _send(router, _generate("y", [1, 2, 3], avoid=("b",)))
    await _send(router, FakeRequest({}))  # not a call for tokens
    first, second = router.view.recently_routed()
    assert (first.replica, first.outcome) == ("b", "hit")
    assert (first.prompt_tokens, first.predicted_tokens, first.best_tokens) == (13, 8, 8)
    assert (second.outcome, second.predicted_tokens) == ("retry", 0)
    assert second.replica != "b"


async def test_a_full_replica_is_not_counted_as_a_hit(router: PrefixRouter) -> None:
    router.view.routing.stored("b", [1])
    router.curr_replicas[_id("b")].queue_len = 8  # type: ignore[attr-defined]
    router.on_new_queue_len_info(_id("b"), 8)
    await _send(router, _generate("x", [1]))
    (routed,) = router.view.recently_routed()
    assert (routed.outcome, routed.predicted_tokens, routed.best_tokens) == ("balanced", 0, 4)


async def test_a_dead_replica_is_forgotten(router: PrefixRouter) -> None:
    router.view.routing.stored("b", [5])
    router.on_replica_actor_died(_id("b"))
    assert router.view.routing.replicas == {"a", "c"}
    assert len(router.view.routing.index) == 0


async def test_the_block_size_comes_from_the_engines(router: PrefixRouter) -> None:
    assert router.view.routing.block_size == 4


def test_the_private_parts_of_serve_that_we_use_exist() -> None:
    for name in ("_choose_replicas_with_backoff", "_select_from_candidate_replicas", "_choose_replica_for_request"):
        assert inspect.isfunction(getattr(RequestRouter, name))
    assert inspect.iscoroutinefunction(DeploymentBroadcastResponse._fetch_replica_results_async)


def _id(name: str) -> ReplicaID:
    return ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)
