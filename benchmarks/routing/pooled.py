"""The bound of routing with transfers: every replica sees one pooled cache, and each request takes the shortest queue.

The cache is one LRU cache as large as those of all replicas together. What a request hits in it is transferred at the
links' rate before its first token. That takes no replica's time, and no links are shared. The queues are known exactly.
Shortest queues are not the best choice for every figure, so a router may have a lower median.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import numpy as np

from benchmarks.routing.cache import BlockCache
from benchmarks.routing.replica import Settings
from benchmarks.routing.traces import BLOCK_SIZE, Request

__all__ = ["pooled_run"]


@dataclass(eq=False)
class _Engine:
    """A queue of prompts, computed one after the other."""

    queue: list[tuple[Request, int]] = field(default_factory=list)  # with the tokens that it will have to compute
    queued_tokens: int = 0  # of the queue, and on their way to it
    ends_at: float = 0.0  # of the prefill that runs

    def seconds(self, now: float, rate: float) -> float:
        return self.queued_tokens / rate + max(0.0, self.ends_at - now)


def pooled_run(requests: Sequence[Request], settings: Settings, *, max_blocks: int | None = None) -> dict[str, float]:
    """Return hit rate and TTFT of the bound; decodes cost prefills nothing.

    Args:
        requests: of a trace, in order.
        settings: of the cluster; ``pull_bytes_per_s`` is infinite if transfers are free.
        max_blocks: of the pooled cache; None: those of all replicas' devices.
    """
    return _Bound(settings, max_blocks).run(requests)


class _Bound:
    def __init__(self, settings: Settings, max_blocks: int | None) -> None:
        self.settings = settings
        self.cache = BlockCache(max_blocks or settings.num_replicas * settings.cache_blocks)
        self.engines = [_Engine() for _ in range(settings.num_replicas)]
        self.transfer_s = settings.token_bytes / settings.pull_bytes_per_s  # of a token
        self.waits: list[float] = []
        self.hit_tokens = 0
        self._events: list[tuple[float, int, str, Request, _Engine | None, int]] = []
        self._numbers = count()

    def run(self, requests: Sequence[Request]) -> dict[str, float]:
        for request in requests:
            self._at(request.at, "arrives", request)
        while self._events:
            now, _, kind, request, engine, tokens = heappop(self._events)
            if engine is None and kind == "arrives":
                self._send(request, now)
            elif engine is None:
                self.cache.release(request.hashes)
            elif kind == "queued":
                engine.queue.append((request, tokens))
                self._start(engine, now)
            else:
                self._start(engine, now)
        tokens = sum(request.input_tokens for request in requests)
        p50, p90 = np.percentile(self.waits, [50, 90])
        return {
            "hit": self.hit_tokens / tokens,
            "ttft_mean": float(np.mean(self.waits)),
            "ttft_p50": float(p50),
            "ttft_p90": float(p90),
        }

    def _at(self, time: float, kind: str, request: Request, engine: _Engine | None = None, tokens: int = 0) -> None:
        heappush(self._events, (time, next(self._numbers), kind, request, engine, tokens))

    def _uncached(self, request: Request) -> int:
        return max(1, request.input_tokens - self.cache.match(request.hashes) * BLOCK_SIZE)

    def _send(self, request: Request, now: float) -> None:
        tokens = self._uncached(request)
        engine = min(self.engines, key=lambda engine: engine.seconds(now, self.settings.prefill_rate))
        engine.queued_tokens += tokens
        self._at(now + self.settings.dispatch_s, "queued", request, engine, tokens)

    def _start(self, engine: _Engine, now: float) -> None:
        """Start the next prefill, unless one runs."""
        if not engine.queue or engine.ends_at > now:
            return
        request, tokens = engine.queue.pop(0)
        engine.queued_tokens -= tokens
        computed = self._uncached(request)
        hit = request.input_tokens - computed
        self.hit_tokens += hit
        self.cache.use(request.hashes)
        engine.ends_at = now + computed / self.settings.prefill_rate
        first_token_at = engine.ends_at + hit * self.transfer_s
        self.waits.append(first_token_at - request.at)
        self._at(engine.ends_at, "computed", request, engine)
        self._at(first_token_at + (request.output_tokens - 1) * self.settings.decode_step_s, "ended", request)
