"""Answers: the requests in flight between the client and the fake engines, both in this process.

client -> router -> engine: arrived          the engine that has the request is the router's decision
engine -> router -> client: first_sent ...   ... first_received, and the same for the end
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Answer", "Answers"]


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class Answer:
    """One request."""

    arrived: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    first_sent: asyncio.Event = field(default_factory=asyncio.Event)
    end_sent: asyncio.Event = field(default_factory=asyncio.Event)
    first_received: asyncio.Future[None] = field(default_factory=_future)
    end_received: asyncio.Future[None] = field(default_factory=_future)

    def fail(self, error: Exception) -> None:
        """Raise an error in whoever waits for this request."""
        for future in (self.arrived, self.first_received, self.end_received):
            if not future.done():
                future.set_exception(error)
                future.exception()  # which marks it as seen


class Answers:
    """The requests in flight by the number of their job, and what else reaches the engines."""

    def __init__(self) -> None:
        self.by_job: dict[int, Answer] = {}
        self.num_repeated = 0  # attempts of the router to send a request again
        self.other_calls: Counter[str] = Counter()

    def arrive(self, job: int, engine: int) -> Answer | None:
        """Return the answer of a request that has reached an engine; None if it was there before."""
        answer = self.by_job[job]
        if answer.arrived.done():
            self.num_repeated += 1
            return None
        answer.arrived.set_result(engine)
        return answer
