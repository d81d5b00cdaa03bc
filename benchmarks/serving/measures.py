"""Figures of a server's client: throughput of concurrent requests, first tokens, and gaps between tokens."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.serving.completions import Outcome, complete, connected
from benchmarks.workloads import Workload
from deployments.cli.bench.prompts import random_ids
from engine.async_engine import AsyncEngine
from engine.outputs import EngineOutput
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

__all__ = [
    "MODEL_NAME",
    "Gaps",
    "engine_first_tokens",
    "gaps_of",
    "http_first_tokens",
    "http_gaps",
    "http_tokens_per_s",
]

MODEL_NAME = "benchmark"
STREAM_PROMPT = 64  # tokens
LONG_PROMPT_AFTER = 16  # tokens of a stream beside the running ones


@dataclass(frozen=True)
class Gaps:
    """Milliseconds between two events with tokens while a long prompt is prefilled, over all streams."""

    streams: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    calm_p50_ms: float  # of the gaps before and after
    long_ttft_s: float
    failed: int


# --- throughput -------------------------------------------------------------------------------------------------


async def http_tokens_per_s(url: str, workload: Workload) -> float:
    """Send all requests at once and return the tokens per second until the last answer ends.

    Raises:
        RuntimeError: if one fails.
    """
    started = perf_counter()
    with connected(url) as target:
        outcomes = await asyncio.gather(
            *(complete(target, _body(request.prompt, request.out)) for request in workload.requests)
        )
    seconds = perf_counter() - started
    if failed := [outcome for outcome in outcomes if not outcome.succeeded]:
        raise RuntimeError(f"{len(failed)} requests failed, one with status {failed[0].status} {failed[0].error}")
    return sum(outcome.tokens for outcome in outcomes) / seconds


# --- the first token --------------------------------------------------------------------------------------------


async def http_first_tokens(url: str, prompts: list[list[int]]) -> list[float]:
    """Return the seconds to the first token of one request after the other."""
    with connected(url) as target:
        return [(await complete(target, _body(prompt, 1))).first_token_s for prompt in prompts]


class _OneToken:
    """The OutputReader of a request for one token.

    Attributes:
        arrived: is set when the token arrives.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.arrived = self._loop.create_future()

    def publish(self, tags: list[Any], token_ids: list[int], others: list[tuple[Any, EngineOutput]]) -> None:
        self._loop.call_soon_threadsafe(self.arrived.set_result, None)

    def fail(self, tag: Any, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self.arrived.set_exception, error)

    def end(self, tag: Any) -> None:
        self.fail(tag, RuntimeError("the request was aborted"))


async def engine_first_tokens(engine: AsyncEngine, prompts: list[list[int]]) -> list[float]:
    """Return the seconds to the first token of each prompt, without a server."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    seconds = []
    for number, prompt in enumerate(prompts):
        started, reader = perf_counter(), _OneToken()
        engine.submit(EngineRequest(str(number), prompt, params), reader, None)
        await reader.arrived
        seconds.append(perf_counter() - started)
    return seconds


# --- gaps -------------------------------------------------------------------------------------------------------


async def http_gaps(url: str, streams: int, num_tokens: int, long_prompt: int) -> Gaps:
    """Run streams, send a prompt of ``long_prompt`` tokens while all of them run, and return their gaps."""
    rng = random.Random(streams)
    with connected(url) as target:
        running = [
            asyncio.create_task(complete(target, _body(random_ids(rng, STREAM_PROMPT), num_tokens)))
            for _ in range(streams)
        ]
        under_way = await complete(
            target, _body(random_ids(rng, STREAM_PROMPT), LONG_PROMPT_AFTER)
        )  # ends when the streams are running
        long = await complete(target, _body(random_ids(rng, long_prompt), 1))
        outcomes = list(await asyncio.gather(*running))
    return gaps_of([*outcomes], long, failed=sum(not item.succeeded for item in [*outcomes, long, under_way]))


def gaps_of(outcomes: list[Outcome], long: Outcome, failed: int = 0) -> Gaps:
    """Return the gaps of streams, those during the long prompt's prefill apart from the others.

    Raises:
        RuntimeError: if no stream ran during the prefill.
    """
    gaps: list[float] = []
    calm: list[float] = []
    for outcome in outcomes:
        for earlier, later in zip(outcome.arrivals_s, outcome.arrivals_s[1:], strict=False):
            ended_before = outcome.sent + later < long.sent
            is_calm = ended_before or outcome.sent + earlier > long.sent + long.first_token_s
            (calm if is_calm else gaps).append(1e3 * (later - earlier))
    if not gaps:
        raise RuntimeError("the streams ended before the long prompt arrived; raise --gap-tokens")
    p50, p99 = np.percentile(gaps, (50, 99))
    return Gaps(
        len(outcomes),
        round(float(p50), 2),
        round(float(p99), 2),
        round(max(gaps), 2),
        round(float(np.median(calm)), 2) if calm else float("nan"),
        round(long.first_token_s, 3),
        failed,
    )


def _body(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
