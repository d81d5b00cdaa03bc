"""After a random hour the index holds exactly the blocks of the engines' block managers.

Three real engines, each with a scheduler, a block manager and a pool so small that it turns over every few steps, run
random requests. What they publish goes through real publishers and sockets to several ingresses, each with the index
that the router uses and a plain dict of sets beside it. Messages are lost, replicas and ingresses are restarted, prefix
caches are reset. An hour at ten steps a second is 36,000 steps; they are 4,000 of each of three replicas, with three
seeds, and evict so much that each pool is replaced hundreds of times. `make test` has a quarter of an hour, and CI
one of the seeds.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import ExitStack

import pytest
import zmq

from deployments.observability.ingress_metrics import KV_INDEX_GAPS
from deployments.observability.recorder import Recorder
from deployments.routing.options import RoutingOptions
from deployments.routing.state import RoutingState
from deployments.transport.kv_events.publisher import KVEventPublisher
from deployments.transport.kv_events.subscriber import KVEventSubscriber
from engine.engine import Engine
from engine.kv.events import StorageName
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.deployments.kv_listener import Known
from tests.engine.kv.test_events import blocks_with_state
from tests.engine.shadow import make_engine
from tests.waiting import until

HOUR = 4000  # steps of each replica
REPLICAS = ("r1", "r10", "r2")
NUM_INGRESSES = 2
NUM_BLOCKS = 48
SYNC_EVERY = 100


class Lossy(KVEventPublisher):
    """Drops a random share of its messages."""

    def __init__(self, replica: str, seed: int) -> None:
        self._rng, self.loss, self.num_lost = random.Random(seed), 0.0, 0
        super().__init__(replica, "127.0.0.1", heartbeat_s=0.05)

    def _send(self, topic: bytes, data: bytes | zmq.Frame) -> None:
        if self.loss and self._rng.random() < self.loss:
            self.num_lost += 1
        else:
            super()._send(topic, data)


class Replica:
    """One engine under random load, and its publisher."""

    def __init__(self, name: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.publisher = Lossy(name, seed)
        self.engine: Engine
        self.engine, _ = make_engine(
            block_size=4,
            num_blocks=NUM_BLOCKS,
            num_host_blocks=NUM_BLOCKS * (name == "r2"),
            num_slots=12 * (name == "r10"),
            on_kv_events=self.publisher.publish_events,
            max_num_batched_tokens=64,
        )
        self._num_requests = 0
        self._texts: list[list[int]] = [[0] * 8]

    def step(self) -> None:
        """Add requests up to four, and run a step."""
        while len(self.engine.scheduler.running) + len(self.engine.scheduler.waiting) < 4:
            self._add()
        self.engine.step()
        if self.rng.random() < 0.002:
            self.engine.reset_prefix_cache()

    def _add(self) -> None:
        head = self.rng.choice(self._texts)[: self.rng.choice([0, 8, 16, 24])]
        prompt = head + [self.rng.randrange(64) for _ in range(self.rng.randint(1, 40))]
        self._texts = [*self._texts[-20:], prompt]
        params = SamplingParams(max_tokens=self.rng.randint(1, 12))
        self.engine.add_request(EngineRequest(str(self._num_requests), prompt, params))
        self._num_requests += 1

    @property
    def blocks(self) -> set[int]:
        """The blocks in the engine's prefix cache."""
        return set(self.engine.block_manager.prefix_cache.published_hashes())

    @property
    def states(self) -> set[int]:
        """The blocks after which a prompt's match can resume."""
        return blocks_with_state(self.engine.block_manager)


class Indexed(Known):
    """A listener that also updates a RoutingState."""

    def __init__(self) -> None:
        super().__init__()
        self.routing = RoutingState(RoutingOptions())
        self.routing.set_replicas(REPLICAS)

    def stored(self, replica: str, hashes: Iterable[int]) -> None:
        self.routing.stored(replica, hashes)
        super().stored(replica, hashes)

    def removed(self, replica: str, hashes: Iterable[int]) -> None:
        self.routing.removed(replica, hashes)
        super().removed(replica, hashes)

    def cleared(self, replica: str) -> None:
        self.routing.cleared(replica)
        super().cleared(replica)

    def states_stored(self, replica: str, hashes: Iterable[int]) -> None:
        self.routing.states_stored(replica, hashes)
        super().states_stored(replica, hashes)

    def states_removed(self, replica: str, hashes: Iterable[int]) -> None:
        self.routing.states_removed(replica, hashes)
        super().states_removed(replica, hashes)

    def saved(self, replica: str, hashes: Iterable[int], storage: StorageName = "disk") -> None:
        self.routing.saved(replica, hashes, storage)
        super().saved(replica, hashes, storage)

    def unsaved(self, replica: str, hashes: Iterable[int], storage: StorageName = "disk") -> None:
        self.routing.unsaved(replica, hashes, storage)
        super().unsaved(replica, hashes, storage)

    def replaced(
        self,
        replica: str,
        hashes: Iterable[int],
        states: Iterable[int] | None = None,
        saved: Iterable[int] = (),
        shared: Iterable[int] = (),
    ) -> None:
        self.routing.replaced(replica, hashes, states, saved, shared)
        super().replaced(replica, hashes, states, saved, shared)

    def knows(self, replica: str, blocks: set[int], states: set[int]) -> bool:
        """Return whether both hold exactly these blocks and states for the replica."""
        if self.states.get(replica, set()) != states or (self.routing.states.states(replica) or set()) != states:
            return False
        return self.blocks[replica] == blocks == self.routing.index.blocks(replica)

    def num_indexed(self) -> int:
        """Return the number of blocks in the index."""
        return len(self.routing.index)


class Cluster:
    """Replicas and ingresses, with restarts and message loss."""

    def __init__(self, stack: ExitStack, seed: int) -> None:
        self._stack = stack
        self._seed = seed
        self.num_made = 0
        self.num_lost = 0
        self.num_evicted = 0
        self.replicas = {name: self._replica(name) for name in REPLICAS}
        self.recorders: list[Recorder] = []
        self.ingresses = [self._ingress() for _ in range(NUM_INGRESSES)]

    def restart_replica(self, name: str) -> None:
        """Replace a replica by a new one of the same name at another endpoint."""
        self.replicas[name].publisher.close()
        self._count(self.replicas[name])
        self.replicas[name] = self._replica(name)
        for _, subscriber in self.ingresses:
            subscriber.set_endpoints(self._endpoints)

    def restart_ingress(self, index: int) -> None:
        """Replace an ingress by a new one with an empty index."""
        self.ingresses[index][1].close()
        self.ingresses[index] = self._ingress()

    def set_loss(self, share: float) -> None:
        """Drop this share of all messages from now on."""
        for replica in self.replicas.values():
            replica.publisher.loss = share

    def check_truth(self) -> None:
        """Wait until every ingress knows exactly the blocks of every replica."""
        for known, _ in self.ingresses:
            for name, replica in self.replicas.items():
                until(
                    lambda k=known, n=name, r=replica: k.knows(n, r.blocks, r.states),
                    f"{name} is known",
                    pause_s=0.002,
                )  # type: ignore[misc]
            union = set().union(*(replica.blocks for replica in self.replicas.values()))
            assert known.num_indexed() == len(union), "the index has a block that no replica holds"

    def close(self) -> None:
        """Close everything and sum up the counters."""
        for replica in self.replicas.values():
            self._count(replica)

    def _count(self, replica: Replica) -> None:
        self.num_lost += replica.publisher.num_lost
        self.num_evicted += replica.engine.block_manager.prefix_cache.num_evicted

    def _replica(self, name: str) -> Replica:
        self.num_made += 1
        replica = Replica(name, 1000 * self._seed + self.num_made)
        self._stack.callback(replica.publisher.close)
        return replica

    def _ingress(self) -> tuple[Indexed, KVEventSubscriber]:
        known, recorder = Indexed(), Recorder()
        subscriber = KVEventSubscriber(known, recorder, resync_s=0.1)
        self._stack.callback(subscriber.close)
        self.recorders.append(recorder)
        subscriber.set_endpoints(self._endpoints)
        return known, subscriber

    @property
    def _endpoints(self) -> dict[str, str]:
        return {name: replica.publisher.endpoint for name, replica in self.replicas.items()}


def num_gaps(recorders: Iterable[Recorder]) -> float:
    return sum(
        sample.value for recorder in recorders for sample in recorder.snapshot() if sample.metric is KV_INDEX_GAPS
    )


def test_the_index_is_exact_after_a_quarter_of_an_hour() -> None:
    _check_index(seed=0, num_steps=HOUR // 4)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.long),
        *(pytest.param(seed, marks=pytest.mark.exhaustive("more seeds")) for seed in (1, 2)),
    ],
)
def test_the_index_is_exact_after_a_random_hour(seed: int) -> None:
    _check_index(seed, HOUR)


def _check_index(seed: int, num_steps: int) -> None:
    with ExitStack() as stack:
        cluster, rng = Cluster(stack, seed), random.Random(seed)
        for step in range(num_steps):
            for replica in cluster.replicas.values():
                replica.step()
            if rng.random() < 0.01:
                cluster.set_loss(rng.choice([0.0, 0.0, 0.02, 0.3]))
            if rng.random() < 0.003:
                cluster.restart_replica(rng.choice(REPLICAS))
            if rng.random() < 0.003:
                cluster.restart_ingress(rng.randrange(NUM_INGRESSES))
            if step % SYNC_EVERY == SYNC_EVERY - 1:
                cluster.check_truth()
        cluster.close()
        assert cluster.num_lost > 20, "too little was lost"
        assert num_gaps(cluster.recorders) > 5
        assert cluster.num_made > len(REPLICAS), "no replica was restarted"
        assert len(cluster.recorders) > NUM_INGRESSES, "no ingress was restarted"
        assert cluster.num_evicted > num_steps // 40 * len(REPLICAS) * NUM_BLOCKS, "too little was evicted"


def test_without_loss_there_is_no_gap_and_one_snapshot() -> None:
    with ExitStack() as stack:
        cluster = Cluster(stack, 99)
        cluster.check_truth()
        for known, _ in cluster.ingresses:
            for name in REPLICAS:
                known.wait_count("replaced", name)
        for _ in range(HOUR // 10):
            for replica in cluster.replicas.values():
                replica.step()
        cluster.check_truth()
        assert num_gaps(cluster.recorders) == 0
        for known, _ in cluster.ingresses:
            assert [known.count("replaced", name) for name in REPLICAS] == [1, 1, 1]
            assert not [name for name in REPLICAS if known.count("lost", name)]
