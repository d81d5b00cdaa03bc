"""RivalPolicy: the simulator's policy, for which a rival's process decides.

The simulated clock stands still while the rival decides, so the speed of this machine does not change a figure. Each
decision comes with the KV events that have arrived by then, ``network_s`` late as for our ingresses.

    policy.py                         side.py
    {"do": "choose", "job": 7, ...}   {"placed": [[7, "replica-03", 12]]}    job, replica, cached blocks it expects
                                      {"placed": []}                         the request waits in the router's queue
    {"do": "first_token", "job": 7}   {"placed": [[9, "replica-03", null]]}  and now request 9 has left the queue
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any

from benchmarks.routing.replica import Job
from benchmarks.routing.rivals.errors import InvalidReplyError
from benchmarks.routing.rivals.process import RivalProcess
from benchmarks.routing.simulation import Cluster
from benchmarks.routing.traces import BLOCK_SIZE

__all__ = ["RivalPolicy"]

CHECKED = 300  # prompts whose cached blocks are compared at the end


class RivalPolicy:
    """A rival's process as a policy. The replicas may not change during the run."""

    def __init__(self, cluster: Cluster, process: RivalProcess, options: dict[str, Any]) -> None:
        """Start the rival's router on the replicas of ``cluster``.

        Raises:
            RivalError: if it does not start.
        """
        self.cluster, self.process = cluster, process
        self.names = list(cluster.replicas)
        self.num_queued = 0  # requests that waited in the router's queue
        self._placed: dict[int, tuple[str, int | None]] = {}
        self._waiting: dict[int, Job] = {}
        self._prompts: set[tuple[int, ...]] = set()
        self._read = dict.fromkeys(self.names, 0)  # entries of a replica's log that the router has
        settings = cluster.settings
        start = {"replicas": self.names, "block_size": BLOCK_SIZE, "cache_blocks": settings.cache_blocks}
        reply = process.ask({"do": "start", **start, "options": options}, process.start_s)
        self.reads: list[str] = reply.get("reads", [])  # of: events, loads
        self.version: str = reply.get("version", "unknown")

    def choose(self, job: Job, now: float, avoid: Collection[str]) -> str | None:
        """Return the router's choice, or None while the request waits in the router's queue."""
        if job.number not in self._placed:
            self._prompts.add(job.request.hashes)
            request = job.request
            prompt = {"input": request.input_tokens, "output": request.output_tokens, "hashes": request.hashes}
            self._waiting[job.number] = job
            self._ask({"do": "choose", "job": job.number, **prompt, "events": self._events(now)}, now)
        if job.number not in self._placed:
            self.num_queued += 1
            return None
        name, blocks = self._placed.pop(job.number)
        del self._waiting[job.number]
        job.predicted_blocks = blocks or 0
        return name

    def dispatched(self, job: Job, now: float) -> None:
        """The router knows its own decisions."""

    def first_token(self, job: Job, now: float) -> None:
        """Let the first token pass through the router."""
        self._ask({"do": "first_token", "job": job.number}, now)

    def completed(self, job: Job, now: float) -> None:
        """Let the end of the answer pass through the router."""
        self._ask({"do": "completed", "job": job.number}, now)

    def admitted(self) -> Sequence[Job]:
        """Return the requests that have left the router's queue."""
        return [self._waiting[number] for number in self._placed]

    def replicas_changed(self, names: Sequence[str]) -> None:
        """Accept the replicas of the start.

        Raises:
            ValueError: if they are others.
        """
        if list(names) != self.names:
            raise ValueError(f"a rival runs on the replicas that it started with, {self.names}, not on {list(names)}")

    def finish(self) -> dict[str, Any]:
        """Return what the router reports at the end of a run.

        Raises:
            InvalidReplyError: if it still holds requests in its queue.
        """
        if self._waiting:
            raise InvalidReplyError(f"the router never placed requests {sorted(self._waiting)[:20]}")
        message: dict[str, Any] = {"do": "finish", "events": self._events(float("inf"))}
        if "events" in self.reads:
            prompts = random.Random(1).sample(sorted(self._prompts), min(CHECKED, len(self._prompts)))
            caches = [replica.cache for replica in self.cluster.replicas.values()]
            message["cached"] = [(hashes, [cache.match(hashes) for cache in caches]) for hashes in prompts]
        return {"queued": self.num_queued, **self.process.ask(message)["report"]}

    def _ask(self, message: dict[str, Any], now: float) -> None:
        loads = self._loads(now) if "loads" in self.reads else None
        reply = self.process.ask({**message, "now": now, "loads": loads})
        for placement in reply.get("placed", ()):
            match placement:
                case [int(number), str(name), int() | None as blocks] if number in self._waiting:
                    if name not in self.cluster.replicas:
                        raise InvalidReplyError(
                            f"the router sent request {number} to {name!r}; the replicas are {', '.join(self.names)}"
                        )
                    self._placed[number] = (name, blocks)
                case _:
                    raise InvalidReplyError(f"the rival placed {placement!r}, which is not a waiting request")

    def _events(self, now: float) -> list[Any]:
        """Return what the replicas have stored and removed since the last call: index, stored, removed."""
        events: list[Any] = []
        if "events" not in self.reads:
            return events
        received = now - self.cluster.settings.network_s
        for index, name in enumerate(self.names):
            log, position = self.cluster.replicas[name].log, self._read[name]
            while position < len(log) and log[position].at <= received:
                entry = log[position]
                position += 1
                assert not entry.cleared, "a rival's replicas do not restart"
                if entry.stored or entry.removed:
                    events.append((index, entry.stored, entry.removed))
            self._read[name] = position
        return events

    def _loads(self, now: float) -> list[dict[str, float]]:
        loads = []
        for replica in self.cluster.replicas.values():
            load = replica.load(now)
            step_s = load.step_costs.seconds(0, load.num_decoding, load.num_decoding_tokens)  # 0 before the first one
            loads.append(
                {
                    "running": load.num_running,
                    "waiting": load.num_waiting,
                    "waiting_tokens": sum(job.tokens for job in replica.queue),
                    "used_blocks": load.num_blocks - load.num_free_blocks,
                    "tokens_per_s": load.num_decoding / step_s if step_s else 0.0,
                }
            )
        return loads
