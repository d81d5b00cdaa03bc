"""TextQueue: the texts that wait for a batch, by priority and in turns of their clients, within limits.

Turns are start-time fair queueing (Goyal, Vin and Cheng, 1996) over tokens: a text of a client that has sent a thousand
does not go before the first text of another.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from engine.errors import OverloadedError
from engine.request import EngineRequest

__all__ = ["TextQueue", "WaitingText"]


@dataclass(slots=True, order=True)
class WaitingText:
    """A request in the queue. The smallest one is computed first.

    Attributes:
        key: (negative priority, start in the client's turns, number of the arrival).
        arrived: by the monotonic clock.
    """

    key: tuple[int, int, int]
    request: EngineRequest = field(compare=False)
    arrived: float = field(compare=False)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return len(self.request.prompt_token_ids)


class TextQueue:
    """A queue without torch.

    Args:
        max_requests: most requests that wait; None: no limit.
        max_tokens: most tokens that wait; None: no limit. A text of any length is accepted if no other waits.
    """

    def __init__(self, max_requests: int | None, max_tokens: int | None) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._heap: list[WaitingText] = []
        self._by_id: dict[str, WaitingText] = {}  # an aborted request leaves here at once, and the heap later
        self._virtual_time = 0  # tokens: the start of the text that was taken last
        self._ends: dict[str, int] = {}  # of each client's last text, in the same tokens
        self.num_tokens = 0
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, request: EngineRequest, arrived: float) -> list[WaitingText]:
        """Add a request; return those of lower priority that were removed to make room, the least important first.

        Raises:
            OverloadedError: if the queue is full and holds too few requests of lower priority.
        """
        self._num_arrived += 1
        start = max(self._virtual_time, self._ends.get(request.client, 0))
        text = WaitingText((-request.priority, start, self._num_arrived), request, arrived)
        rejected = self._to_reject(text)
        self._ends[request.client] = start + text.num_tokens
        for victim in rejected:
            self.remove(victim.request.request_id)
        heapq.heappush(self._heap, text)
        self._by_id[request.request_id] = text
        self.num_tokens += text.num_tokens
        return rejected

    def _to_reject(self, text: WaitingText) -> list[WaitingText]:
        if self._fits(len(self._by_id) + 1, self.num_tokens + text.num_tokens):
            return []
        rejected: list[WaitingText] = []
        num_requests, num_tokens = len(self._by_id) + 1, self.num_tokens + text.num_tokens
        for victim in sorted(self._by_id.values(), reverse=True):
            if victim.request.priority >= text.request.priority:
                break
            rejected.append(victim)
            num_requests, num_tokens = num_requests - 1, num_tokens - victim.num_tokens
            if self._fits(num_requests, num_tokens):
                return rejected
        raise OverloadedError(f"{len(self._by_id)} texts with {self.num_tokens} tokens wait already; try again shortly")

    def _fits(self, num_requests: int, num_tokens: int) -> bool:
        if self._max_requests is not None and num_requests > self._max_requests:
            return False
        return self._max_tokens is None or num_requests == 1 or num_tokens <= self._max_tokens

    def remove(self, request_id: str) -> WaitingText | None:
        """Remove a request that has been aborted; None if it does not wait."""
        text = self._by_id.pop(request_id, None)
        if text is not None:
            self.num_tokens -= text.num_tokens
        return text

    def next_batch(self, max_tokens: int, max_texts: int) -> list[WaitingText]:
        """Remove and return the first texts that fit a batch: at least one, if any waits."""
        batch: list[WaitingText] = []
        num_tokens = 0
        while self._heap and len(batch) < max_texts:
            first = self._heap[0]
            if self._by_id.get(first.request.request_id) is not first:  # removed
                heapq.heappop(self._heap)
                continue
            if batch and num_tokens + first.num_tokens > max_tokens:
                break
            heapq.heappop(self._heap)
            self.remove(first.request.request_id)
            batch.append(first)
            num_tokens += first.num_tokens
            self._virtual_time = max(self._virtual_time, first.key[1])
        if not self._by_id:  # everyone's turn begins again
            self._virtual_time, self._ends, self._heap = 0, {}, []
        return batch
