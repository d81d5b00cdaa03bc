"""ResponseStore: the responses that an ingress keeps in its memory, so that later requests can continue them."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["ResponseStore", "StoredResponse"]

_BYTES_PER_ITEM = 512  # of Python's objects for a response and for each item of its output, about


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that is kept.

    Attributes:
        response: its JSON.
        input: the JSON list of its input items, those of earlier responses included.
        item_ids: of its output.
        status: of the response.
        is_background: whether it was created with ``background``.
        events: of its stream, if that was in the background.
    """

    response: bytes
    input: bytes
    item_ids: tuple[str, ...] = ()
    status: str = "completed"
    is_background: bool = False
    events: tuple[bytes, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, about."""
        events = sum(map(sys.getsizeof, self.events))
        return len(self.response) + len(self.input) + events + _BYTES_PER_ITEM * (1 + len(self.item_ids))


class ResponseStore:
    """Keeps responses by id; the oldest go first. Several threads may use it.

    Args:
        max_responses: number of responses; 0 keeps none.
        max_bytes: of all of them.
        ttl_s: seconds for which one is kept.
        clock: returns seconds.
    """

    def __init__(
        self, max_responses: int, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()  # id -> deadline, the oldest first
        self._response_of: dict[str, str] = {}  # id of an output item -> id of its response
        self._num_bytes = 0

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a response, unless it alone exceeds the limit, and drop the oldest ones beyond the limits."""
        with self._lock:
            self._drop(response_id)
            if stored.num_bytes > self._max_bytes:
                return
            self._stored[response_id] = self._clock() + self._ttl_s, stored
            self._response_of.update(dict.fromkeys(stored.item_ids, response_id))
            self._num_bytes += stored.num_bytes
            self._drop_expired()
            while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._stored)))

    def add_events(self, response_id: str, events: Sequence[bytes]) -> None:
        """Keep the events of a response that is kept, unless they exceed the limit beside all the others."""
        with self._lock:
            entry = self._stored.get(response_id)
            if entry is None:
                return
            deadline, before = entry
            stored = replace(before, events=tuple(events))
            num_bytes = self._num_bytes + stored.num_bytes - before.num_bytes
            if num_bytes <= self._max_bytes:
                self._stored[response_id], self._num_bytes = (deadline, stored), num_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response; None if it is not kept."""
        with self._lock:
            self._drop_expired()
            entry = self._stored.get(response_id)
            return None if entry is None else entry[1]

    def items(self, ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return the output items with these ids, as far as they are kept."""
        with self._lock:
            self._drop_expired()
            responses = {response_id for item_id in ids if (response_id := self._response_of.get(item_id)) is not None}
            stored = [self._stored[response_id][1] for response_id in responses]
        items = (item for response in stored for item in json.loads(response.response)["output"])
        wanted = frozenset(ids)
        return {item["id"]: item for item in items if item["id"] in wanted}

    def delete(self, response_id: str) -> bool:
        """Drop a response; returns whether it was kept."""
        with self._lock:
            self._drop_expired()
            return self._drop(response_id)

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._stored and next(iter(self._stored.values()))[0] <= now:
            self._drop(next(iter(self._stored)))

    def _drop(self, response_id: str) -> bool:
        _, stored = self._stored.pop(response_id, (0.0, None))
        if stored is None:
            return False
        for item_id in stored.item_ids:
            self._response_of.pop(item_id, None)
        self._num_bytes -= stored.num_bytes
        return True
