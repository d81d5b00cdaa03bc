"""The routing simulator with host tiers and transfers: what is modelled, and that the router gains by it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from benchmarks.routing.pooled import pooled_run
from benchmarks.routing.production import ProductionPolicy
from benchmarks.routing.replica import SHARED_STEPS, Job, Settings, SimulatedReplica
from benchmarks.routing.simulation import Change, Result, simulate
from benchmarks.routing.tiers import TieredCache
from benchmarks.routing.traces import BLOCK_SIZE, Request, bursts, no_sharing
from benchmarks.routing.transfers import Transfers
from tests.benchmarks.test_routing_simulator import conversations, hit_rate

SETTINGS = Settings(num_replicas=4, cache_tokens=400 * BLOCK_SIZE)
PULLS = replace(SETTINGS, pull_bytes_per_s=10e9)
BLOCK_S = BLOCK_SIZE * SETTINGS.token_bytes / 10e9  # on the wire


def run(requests: Sequence[Request], settings: Settings, changes: Sequence[Change] = ()) -> Result:
    return simulate(requests, settings, ProductionPolicy, changes=changes)


def ttft(result: Result) -> float:
    return sum(job.first_token_at - job.request.at for job in result.jobs) / len(result.jobs)


def popular(seed: int = 0, number: int = 400, per_second: float = 8.0) -> list[Request]:
    """Return questions about one long document, which are too many for one replica."""
    rng, now, requests = random.Random(seed), 0.0, []
    for index in range(number):
        now += rng.expovariate(per_second)
        blocks = (*range(60), *range(1_000 * (index + 1), 1_000 * (index + 1) + 4))
        requests.append(Request(now, 64 * BLOCK_SIZE + 50, rng.randrange(50, 300), blocks))
    return requests


class Wire:
    """Two replicas with transfers between them, and the calls that are due."""

    def __init__(self, settings: Settings = PULLS) -> None:
        self.replicas = {name: SimulatedReplica(name, settings) for name in "abc"}
        self.due: list[tuple[float, Callable[[float], None]]] = []
        self.queued: list[tuple[Job, float]] = []
        self.transfers = Transfers(
            self.replicas, lambda time, call: self.due.append((time, call)), lambda job, _, now: self._queue(job, now)
        )

    def _queue(self, job: Job, now: float) -> None:
        self.queued.append((job, now))

    def hold(self, name: str, blocks: Sequence[int]) -> None:
        cache = self.replicas[name].cache
        cache.use(blocks)
        cache.release(blocks)

    def pull(self, number: int, target: str, source: str, blocks: int = 10, now: float = 0.0) -> bool:
        job = Job(number, Request(now, 20 * BLOCK_SIZE, 5, tuple(range(20))), 0, source=source, source_blocks=blocks)
        return self.transfers.arrive(job, self.replicas[target], now)

    def end(self) -> list[float]:
        """Make the calls that are due; return when."""
        times = []
        while self.due:
            time, call = self.due.pop(0)
            times.append(time)
            call(time)
        return times


def test_blocks_come_after_their_time_on_the_wire_and_are_published_then() -> None:
    wire = Wire()
    wire.hold("a", range(12))
    wire.hold("b", range(2))
    assert wire.pull(1, "b", "a")
    target = wire.replicas["b"]
    assert (target.cache.match(range(20)), wire.queued) == (2, [])
    assert target.queued_tokens(0.0) == 10 * BLOCK_SIZE  # what it will have to compute
    assert wire.end() == [pytest.approx(8 * BLOCK_S)]
    assert target.cache.match(range(20)) == 10
    assert [time for _, time in wire.queued] == [pytest.approx(8 * BLOCK_S)]
    assert [entry.stored for entry in target.log if entry.stored] == [tuple(range(2, 10))]
    assert target.queued_tokens(1.0) == 0  # it is in nobody's queue here
    (rate,) = target.pulls.reported()
    assert (rate.source, rate.latency_s) == ("a", 0.0)
    assert rate.tokens_per_s == pytest.approx(BLOCK_SIZE / BLOCK_S)


def test_a_link_carries_one_transfer_after_the_other_in_each_direction() -> None:
    wire = Wire()
    wire.hold("a", range(10))
    wire.hold("c", range(30, 40))
    assert wire.pull(1, "b", "a")
    assert wire.pull(2, "c", "a")
    assert wire.end() == [pytest.approx(10 * BLOCK_S), pytest.approx(20 * BLOCK_S)]
    assert wire.replicas["c"].pulls.reported()[0].latency_s == pytest.approx(10 * BLOCK_S)


def test_a_request_waits_for_blocks_that_are_on_their_way() -> None:
    wire = Wire()
    wire.hold("a", range(10))
    assert wire.pull(1, "b", "a")
    assert wire.pull(2, "b", "", now=0.01)
    wire.end()
    assert [(job.number, time) for job, time in wire.queued] == [
        (1, pytest.approx(10 * BLOCK_S)),
        (2, pytest.approx(10 * BLOCK_S)),
    ]
    assert wire.transfers.num_tokens == 10 * BLOCK_SIZE


def test_a_slow_transfer_ends_after_a_quarter_more_than_computing_takes_and_its_part_is_used() -> None:
    wire = Wire(replace(PULLS, pull_bytes_per_s=0.5e9))
    wire.hold("a", range(20))
    assert wire.pull(1, "b", "a", blocks=20)
    (ended,) = wire.end()
    assert ended == pytest.approx(1.25 * 20 * BLOCK_SIZE / PULLS.prefill_rate)
    assert wire.replicas["b"].cache.match(range(20)) == int(ended * 0.5e9 / (BLOCK_SIZE * PULLS.token_bytes)) == 14


def test_a_source_that_restarts_brings_nothing_and_a_target_that_does_forgets_the_request() -> None:
    for name in "ab":
        wire = Wire()
        wire.hold("a", range(10))
        assert wire.pull(1, "b", "a")
        lost = wire.replicas[name].restart(0.01)
        assert [job.number for job in lost] == [1] * (name == "b")
        wire.end()
        assert len(wire.queued) == (name == "a")
        assert wire.replicas["b"].cache.match(range(20)) == 0


def test_leased_blocks_are_not_evicted_and_room_is_kept_for_those_on_their_way() -> None:
    cache = TieredCache(4)
    cache.use([1, 2, 3, 4])
    cache.release([1, 2, 3, 4])
    cache.lease([3, 4])
    assert cache.reserve(2) == [2, 1]
    assert cache.use([9]) == []
    assert 3 in cache
    assert 4 in cache
    cache.end_lease([3, 4])
    assert cache.receive([7, 8], 2) == [7, 8]
    assert cache.use([10]) == [4, 3]


def test_what_the_device_evicts_goes_to_the_host_and_comes_back() -> None:
    cache = TieredCache(3, 2)
    cache.use([1, 2, 3])
    cache.release([1, 2, 3])
    assert cache.use([7, 8]) == []
    assert (cache.match([1, 2, 3]), cache.num_on_host([1, 2, 3])) == (3, 2)
    cache.release([7, 8])
    assert cache.use([1, 2, 3]) == []  # they move to the device, and 8 and 7 to the host
    assert (cache.num_on_host([1, 2, 3]), cache.num_on_host([7, 8])) == (0, 2)
    cache.release([1, 2, 3])
    assert cache.use([10, 11, 12]) == [8, 7, 3]


def test_loading_from_the_host_takes_time_before_the_prefill() -> None:
    settings = replace(SETTINGS, cache_tokens=12 * BLOCK_SIZE, host_tokens=12 * BLOCK_SIZE, load_bytes_per_s=1e9)
    replica = SimulatedReplica("a", settings)
    for first in (0, 20):
        replica.cache.use(range(first, first + 10))
        replica.cache.release(range(first, first + 10))
    replica.arrive(Job(1, Request(0.0, 10 * BLOCK_SIZE + 65, 5, tuple(range(10))), 0), 0.0)
    work = replica.begin(0.0)
    assert work is not None
    assert work.ends_at == pytest.approx(8 * settings.load_s + 65 / settings.prefill_rate)


@pytest.mark.parametrize("steps", [None, SHARED_STEPS], ids=["decodes free", "shared steps"])
@pytest.mark.parametrize("num_ingresses", [1, 4])
def test_every_request_is_served_and_counted_with_pulls_and_failures(num_ingresses: int, steps: object) -> None:
    settings = replace(PULLS, num_ingresses=num_ingresses, steps=steps, host_tokens=200 * BLOCK_SIZE)  # type: ignore[arg-type]
    changes = [Change(15.0, "restart", "replica-01"), Change(20.0, "kill", "replica-02")]
    result = run(popular(), settings, changes)
    assert any(job.source for job in result.jobs)
    assert all(job.first_token_at > job.request.at for job in result.jobs)
    assert result.ghosts == 0
    undisturbed = run(popular(), settings)
    tokens = sum(job.request.input_tokens for job in undisturbed.jobs)
    computed = sum(replica.computed_tokens for replica in undisturbed.cluster.all_replicas)
    assert computed + sum(job.hit_tokens for job in undisturbed.jobs) == tokens
    for replica in undisturbed.cluster.all_replicas:
        assert not replica.waiting
        assert replica.queued_tokens(1e9) == 0


def test_the_index_of_an_ingress_equals_the_caches_with_pulls() -> None:
    for job in run(popular(), PULLS).jobs:
        assert job.predicted_blocks * BLOCK_SIZE == job.hit_tokens or job.source


def test_a_popular_document_is_replicated_and_its_queue_vanishes() -> None:
    for number in (1, 16):
        without, pulled = (run(popular(), replace(settings, num_ingresses=number)) for settings in (SETTINGS, PULLS))
        assert ttft(pulled) < 0.5 * ttft(without)
        assert len({job.replica for job in pulled.jobs if job.source}) >= 2
        assert 0 < pulled.pulled_tokens < 30 * 60 * BLOCK_SIZE  # not once for each request


@pytest.mark.parametrize("rate", [1e9, 0.1e9])
@pytest.mark.parametrize(
    "requests", [popular(), conversations(), bursts(0, number=40)], ids=["popular", "conversations", "bursts"]
)
def test_slow_pulls_are_never_worse_than_none(requests: list[Request], rate: float) -> None:
    """Beyond the noise of another order of events."""
    without, slow = run(requests, SETTINGS), run(requests, replace(PULLS, pull_bytes_per_s=rate))
    assert ttft(slow) <= 1.03 * ttft(without)


def test_prompts_without_sharing_are_routed_as_without_pulls() -> None:
    requests = no_sharing(0, number=200)
    routes = [[job.replica for job in run(requests, settings).jobs] for settings in (SETTINGS, PULLS)]
    assert routes[0] == routes[1]


def test_where_some_replicas_queue_pulls_bring_a_part_of_what_one_pooled_cache_would() -> None:
    requests = [replace(request, at=request.at * 1.6) for request in conversations(number=600)]
    pulled, today, bound = run(requests, PULLS), run(requests, SETTINGS), pooled_run(requests, PULLS)
    assert pulled.pulled_tokens
    assert bound["hit"] > hit_rate(pulled) > hit_rate(today)
    assert bound["ttft_mean"] < ttft(pulled) < 0.8 * ttft(today)


def test_the_bound_takes_the_shortest_queue_and_adds_the_transfer() -> None:
    """The second of two equal prompts finds the blocks of the first, and goes to the other replica."""
    request = Request(0.0, 10 * BLOCK_SIZE + 65, 1, tuple(range(10)))
    settings = replace(PULLS, num_replicas=2)
    computed = settings.dispatch_s + request.input_tokens / settings.prefill_rate
    hit = settings.dispatch_s + 65 / settings.prefill_rate + 10 * BLOCK_S
    assert pooled_run([request], settings)["ttft_mean"] == pytest.approx(computed)
    twins = pooled_run([request, replace(request, at=0.01)], settings)
    assert twins["ttft_mean"] == pytest.approx((computed + hit) / 2)
