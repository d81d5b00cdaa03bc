"""The routing simulator: invariants for every policy, on traces of a few hundred requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from benchmarks.routing.baselines.registry import BASELINES
from benchmarks.routing.cache import BlockCache, infinite_bound, pooled_bound
from benchmarks.routing.production import ProductionPolicy
from benchmarks.routing.replica import SHARED_STEPS, Job, Settings, SimulatedReplica
from benchmarks.routing.shared_steps import SharedStepReplica
from benchmarks.routing.simulation import Change, Cluster, Policy, Result, simulate
from benchmarks.routing.traces import BLOCK_SIZE, Request, bursts, no_sharing
from deployments.routing.state import RoutingState
from engine.observability.load import EngineLoad
from engine.observability.step_costs import StepCosts

SETTINGS = Settings(num_replicas=4, cache_tokens=100 * BLOCK_SIZE)


def conversations(seed: int = 0, number: int = 300) -> list[Request]:
    """Return requests that each continue one of 40 conversations; all begin with one common block."""
    rng, grown, requests = random.Random(seed), {item: [0] for item in range(40)}, []
    for index in range(number):
        blocks = grown[rng.randrange(40)]
        blocks.extend(1_000 * index + 1 + block for block in range(rng.randrange(1, 6)))
        requests.append(Request(index * 0.1, len(blocks) * BLOCK_SIZE + 100, 50, tuple(blocks)))
    return requests


def run(requests: Sequence[Request], policy: str, settings: Settings = SETTINGS, **options: object) -> Result:
    def make(cluster: Cluster) -> Policy:
        if policy == "ours":
            return ProductionPolicy(cluster)
        kind, defaults, _ = BASELINES[policy]
        return kind(cluster, **defaults)

    return simulate(requests, settings, make, **options)  # type: ignore[arg-type]


def hit_rate(result: Result) -> float:
    return sum(job.hit_tokens for job in result.jobs) / sum(job.request.input_tokens for job in result.jobs)


@pytest.mark.parametrize("steps", [None, SHARED_STEPS], ids=["decodes free", "shared steps"])
@pytest.mark.parametrize("policy", ["ours", *BASELINES])
def test_every_policy_serves_every_request_and_none_beats_the_bounds(policy: str, steps: StepCosts | None) -> None:
    requests = conversations()
    result = run(requests, policy, replace(SETTINGS, steps=steps))
    assert all(job.ended_at > job.first_token_at for job in result.jobs)
    assert all(job.first_token_at > job.request.at for job in result.jobs)
    tokens = sum(request.input_tokens for request in requests)
    computed = sum(replica.computed_tokens for replica in result.cluster.all_replicas)
    assert computed + sum(job.hit_tokens for job in result.jobs) == tokens
    assert not any(result.cluster.outstanding.values())
    # An LRU cache in which requests run at once does not bound those in which they hold blocks for a while. Those that
    # wait for shared steps hold more blocks than the caches have.
    pooled, infinite = pooled_bound(requests, 4 * SETTINGS.cache_blocks), infinite_bound(requests)
    assert hit_rate(result) <= (pooled + 0.02 if steps is None else infinite)
    assert pooled <= infinite


def test_the_same_seed_gives_the_same_result() -> None:
    requests, settings = conversations(), Settings(num_replicas=4, cache_tokens=50_000, num_ingresses=3, loss=0.1)
    first, other = (run(requests, "ours", settings, seed=3) for _ in range(2))
    assert [job.first_token_at for job in first.jobs] == [job.first_token_at for job in other.jobs]
    assert [job.replica for job in first.jobs] == [job.replica for job in other.jobs]


@pytest.mark.parametrize("steps", [None, SHARED_STEPS], ids=["decodes free", "shared steps"])
@pytest.mark.parametrize("num_ingresses", [1, 4])
def test_a_restart_leaves_no_ghost_hits(num_ingresses: int, steps: StepCosts | None) -> None:
    settings = replace(SETTINGS, num_ingresses=num_ingresses, steps=steps)
    result = run(conversations(), "ours", settings, changes=[Change(15.0, "restart", "replica-01")])
    assert all(job.first_token_at > 0 for job in result.jobs)
    after = [job for job in result.jobs if job.request.at > 15.1 and job.replica == "replica-01"]
    assert after
    assert result.ghosts == 0


@pytest.mark.parametrize("num_ingresses", [1, 4])
def test_a_replica_slowed_to_a_third_soon_gets_a_third_of_the_work(num_ingresses: int) -> None:
    """And requests take hardly longer than if its speed were known at once."""
    settings = Settings(num_ingresses=num_ingresses, num_replicas=4, steps=SHARED_STEPS)
    slow, name = Change(60.0, "slow", "replica-01", 3.0), "replica-01"
    requests = no_sharing(1, number=400, per_second=1.2)
    result = run(requests, "ours", settings, changes=[slow])

    def share(start: float, end: float) -> float:
        """Return the part of a replica's fair share of the tokens sent in an interval."""
        sent = [job for job in result.jobs if start <= job.request.at < end]
        tokens = sum(job.request.input_tokens for job in sent if job.replica == name)
        return 4 * tokens / sum(job.request.input_tokens for job in sent)

    assert 0.7 < share(0.0, 60.0) < 1.3
    assert share(65.0, 1e9) < 0.5
    after = [job for job in result.jobs if job.request.at >= 60.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedStepReplica, "load", _load_of_true_speed)
        oracle = run(requests, "ours", settings, changes=[slow])
    known = [job for job in oracle.jobs if job.request.at >= 60.0]
    whole, best = (sum(job.ended_at - job.request.at for job in jobs) / len(jobs) for jobs in (after, known))
    assert whole < 1.1 * best


def _load_of_true_speed(replica: SharedStepReplica, now: float) -> EngineLoad:
    load, true = LOAD(replica, now), SHARED_STEPS
    costs = StepCosts(*(replica.slowdown * getattr(true, name) for name in StepCosts.__struct_fields__))
    return structs.replace(load, step_costs=costs, prefill_tokens_per_s=5_500 / replica.slowdown)


LOAD = SharedStepReplica.load


def test_ghost_hits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoutingState, "cleared", lambda state, replica: None)
    assert run(conversations(), "ours", changes=[Change(15.0, "restart", "replica-01")]).ghosts > 0


def test_a_burst_through_many_ingresses_goes_to_one_replica_if_queues_are_announced() -> None:
    """They arrive within 20 ms; only those before the first announcement are routed without it.

    An ingress that has sent one of them counts it twice, until it must be in the replica's reports: it may send the
    next one to a second replica, where all others then find the prompt, too.
    """
    burst = [Request(0.001 * number, 20 * BLOCK_SIZE + 9, 50, tuple(range(20))) for number in range(20)]
    used = {}
    for announce in (False, True):
        settings = Settings(num_replicas=4, num_ingresses=16, announce=announce)
        used[announce] = {job.replica for job in run(burst, "ours", settings).jobs}
    assert len(used[True]) <= 2 < len(used[False])


def test_a_killed_replica_gets_no_more_requests_and_none_is_lost() -> None:
    result = run(conversations(), "ours", changes=[Change(15.0, "kill", "replica-01")])
    assert all(job.first_token_at > 0 for job in result.jobs)
    assert not any(job.replica == "replica-01" for job in result.jobs if job.request.at > 15.0)


def test_an_added_replica_is_used() -> None:
    result = run(conversations(), "ours", changes=[Change(15.0, "add", "replica-04")])
    assert any(job.replica == "replica-04" for job in result.jobs)


def test_the_index_of_an_ingress_equals_the_replicas_caches() -> None:
    """With large caches and prompt events, every prediction is correct."""
    settings = Settings(num_replicas=4, num_ingresses=1)
    for job in run(conversations(), "ours", settings).jobs:
        assert job.predicted_blocks * BLOCK_SIZE == job.hit_tokens


def test_a_replica_counts_a_queued_block_once_and_publishes_by_chunks() -> None:
    replica, request = SimulatedReplica("a", SETTINGS), Request(0.0, 10 * BLOCK_SIZE + 1, 10, tuple(range(10)))
    for number in range(3):
        replica.arrive(Job(number, request, 0), 0.0)
    assert replica.queued_tokens(0.0) == 10 * BLOCK_SIZE + 3
    work = replica.begin(0.0)
    assert work is not None
    assert work.ends_at == pytest.approx((10 * BLOCK_SIZE + 1) / SETTINGS.prefill_rate)
    assert [len(entry.stored) for entry in replica.log if entry.stored] == [4, 4, 2]
    assert replica.log[-1].at == pytest.approx(10 * BLOCK_SIZE / SETTINGS.prefill_rate)


def test_a_step_computes_prompts_and_answers_together() -> None:
    """Two prompts fit into the first step; the first answer then delays the rest of the second prompt."""
    replica = SharedStepReplica("a", replace(SETTINGS, steps=StepCosts(1.0, 0.001, 0.25, 0.0001)))
    first, second = (
        Job(number, Request(0.0, length, 3, tuple(range(100 * number, 100 * number + length // BLOCK_SIZE))), 0)
        for number, length in enumerate([1_000, 2_000])
    )
    for job in first, second:
        replica.arrive(job, 0.0)
    work = replica.begin(0.0)
    assert work is not None
    assert (work.ends_at, work.started) == (pytest.approx(2.048), (first, second))
    assert replica.begin(1.0) is None
    assert replica.finish(2.048).first_tokens == (first,)
    work = replica.begin(2.048)
    assert work is not None
    assert work.ends_at - 2.048 == pytest.approx(0.952 + 1.0 + 0.25 + 0.1)
    assert replica.finish(work.ends_at) == ((second,), (), None)
    assert (first.first_token_at, second.first_token_at) == (2.048, work.ends_at)
    work = replica.begin(work.ends_at)
    assert work is not None
    assert replica.finish(work.ends_at).ended == (first,)
    assert replica.load(work.ends_at).num_running == 2  # it is the caller that releases its blocks


def test_the_cache_evicts_suffixes_first_and_no_block_in_use() -> None:
    cache = BlockCache(4)
    cache.use([1, 2, 3])
    assert cache.use([7, 8, 9]) == []  # more than it has room for, but all in use
    cache.release([1, 2, 3])
    assert cache.use([11]) == [3, 2, 1]
    assert len(cache) == 4


def test_generated_traces_share_nothing_or_come_in_bursts() -> None:
    assert infinite_bound(no_sharing(0, number=200)) == 0.0
    assert infinite_bound(bursts(0, number=50)) > 0.8
