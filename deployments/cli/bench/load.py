"""run_load: sends sessions by arrival times, at a rate, or from a number of clients, and collects the outcomes."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Any

from deployments.cli.bench.http import HttpTarget, Outcome
from deployments.cli.bench.prompts import random_ids
from deployments.cli.bench.workload import Session

__all__ = ["Run", "run_load"]

_STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(slots=True)
class Run:
    """The outcomes of all requests. Times are seconds of ``perf_counter``.

    Attributes:
        cpu_s: CPU time of this process in the run.
        was_interrupted: the user has ended it early; requests that had not ended are left out.
    """

    started_at: float
    ended_at: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    cpu_s: float = 0.0
    was_interrupted: bool = False


async def run_load(
    target: HttpTarget,
    sessions: Iterable[Session],
    model: str,
    *,
    concurrency: int | None = None,
    rate: float | None = None,
    seed: int = 0,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> Run:
    """Send all sessions; return when their answers have ended, or the task is cancelled.

    Args:
        target: the server.
        sessions: to send; those with an arrival time are sent then.
        model: named in the requests that name none.
        concurrency: clients; each sends its next session when it has ended one.
        rate: sessions a second, at random times (a Poisson process); without rate and concurrency all start at once.
        seed: of these times.
        on_outcome: is called with each outcome.
    """
    gc.collect()
    gc.freeze()  # a collection would walk all that was imported, and delay the times that are taken
    run, cpu_s = Run(perf_counter()), process_time()
    client = _Client(target, model, run, on_outcome)
    try:
        if concurrency is not None:
            await client.keep_busy(iter(sessions), concurrency)
        else:
            await client.send_at(_arrivals(sessions, rate, seed))
    except asyncio.CancelledError:
        run.was_interrupted = True
    finally:
        gc.unfreeze()
        run.ended_at = max((outcome.ended_at for outcome in run.outcomes), default=perf_counter())
        run.cpu_s = process_time() - cpu_s
        target.close()
    return run


def _arrivals(sessions: Iterable[Session], rate: float | None, seed: int) -> Iterator[tuple[float, Session]]:
    """Yield sessions with the seconds after the start at which they are sent."""
    rng, now = random.Random(seed), 0.0
    for session in sessions:
        if session.at_s is not None:
            yield session.at_s, session
            continue
        yield now, session
        if rate is not None:
            now += rng.expovariate(rate)


class _Client:
    def __init__(self, target: HttpTarget, model: str, run: Run, on_outcome: Callable[[Outcome], None]) -> None:
        self._target = target
        self._model = model
        self._run = run
        self._on_outcome = on_outcome

    async def keep_busy(self, sessions: Iterator[Session], number: int) -> None:
        """Run sessions one after the other, ``number`` of them at a time."""

        async def work() -> None:
            for session in sessions:
                await self._converse(session, None)

        async with asyncio.TaskGroup() as clients:
            for _ in range(number):
                clients.create_task(work())

    async def send_at(self, arrivals: Iterable[tuple[float, Session]]) -> None:
        """Start each session at its time, whatever the others do."""
        async with asyncio.TaskGroup() as clients:
            for at_s, session in arrivals:
                due = self._run.started_at + at_s
                if (wait_s := due - perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                clients.create_task(self._converse(session, due))

    async def _converse(self, session: Session, due: float | None) -> None:
        body: dict[str, Any] = {**_STREAM, "model": self._model, **session.body}
        outcome = await self._send(session.path, body, due)
        for ids, max_tokens in session.later:
            if outcome.error:
                return
            # A server that sends no ids gets drawn ones in place of its answer, which then is not found in its cache.
            answer = outcome.token_ids or random_ids(random.Random(0), outcome.num_tokens)
            prompt: list[int] = body["prompt"] + answer + ids
            body = body | {"prompt": prompt, "max_tokens": max_tokens}
            outcome = await self._send(session.path, body, None)

    async def _send(self, path: str, body: dict[str, Any], due: float | None) -> Outcome:
        outcome = await self._target.send(path, body)
        outcome.late_s = None if due is None else outcome.sent_at - due
        self._run.outcomes.append(outcome)
        self._on_outcome(outcome)
        return outcome
