"""Traces of requests: the Mooncake conversation trace, and generated traces on which nothing was tuned.

A request's blocks are chained hashes, as in production; only full blocks have one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from deployments.cli.bench.trace import BLOCK_SIZE, read_trace

__all__ = ["BLOCK_SIZE", "Request", "agents", "bursts", "documents", "load_mooncake", "no_sharing", "popular", "spread"]

STAMP_S = 3.0  # the Mooncake trace's timestamps are multiples of this
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    at: float  # seconds
    input_tokens: int
    output_tokens: int
    hashes: tuple[int, ...]  # of the full blocks


def load_mooncake(path: Path, seed: int) -> list[Request]:
    """Read the trace; requests of one timestamp are spread at random over its interval, in order."""
    rng = random.Random(seed)
    requests = []
    for stamp, group in groupby(read_trace(path), key=lambda line: line.at_s):
        members = list(group)
        offsets = sorted(rng.uniform(0, STAMP_S) for _ in members)
        for offset, line in zip(offsets, members, strict=True):
            blocks = list(line.block_ids[: line.input_tokens // BLOCK_SIZE])
            requests.append(_request(stamp + offset, line.input_tokens, line.output_tokens, blocks))
    return requests


def no_sharing(seed: int, number: int = 6_000, per_second: float = 2.5) -> list[Request]:
    """Return requests at random times that share nothing, with the lengths of chat (lognormal, mean about 12,000)."""
    rng = random.Random(seed)
    now, next_block, requests = 0.0, 0, []
    for _ in range(number):
        now += rng.expovariate(per_second)
        tokens = min(120_000, max(16, round(rng.lognormvariate(8.9, 1.0))))
        blocks = list(range(next_block, next_block + tokens // BLOCK_SIZE))
        next_block += len(blocks)
        requests.append(_request(now, tokens, rng.randrange(50, 600), blocks))
    return requests


def bursts(seed: int, number: int = 400, per_second: float = 1.0) -> list[Request]:
    """Return bursts of 4 to 24 requests within 50 ms that share one long new document, with a question each."""
    rng = random.Random(seed)
    now, next_block, requests = 0.0, 1, []
    for _ in range(number):
        now += rng.expovariate(per_second)
        document = [0, *range(next_block, next_block + rng.randrange(8, 48))]  # all begin with one system prompt
        next_block = document[-1] + 1
        for at in sorted(now + rng.uniform(0, 0.05) for _ in range(rng.randrange(4, 25))):
            tokens = len(document) * BLOCK_SIZE + rng.randrange(20, 500)
            requests.append(_request(at, tokens, rng.randrange(50, 600), document))
    return sorted(requests, key=lambda request: request.at)


def agents(seed: int, number: int = 300, per_second: float = 0.15) -> list[Request]:
    """Return the turns of agents that start at random: each turn adds a tool's output to the prompt of the one before.

    An agent has one of four system prompts of 4 to 8 thousand tokens and 5 to 30 turns. Between them the tool takes
    lognormal times with a median of 4 s, answers included.
    """
    rng = random.Random(seed)
    systems = [list(range(1_000 * kind, 1_000 * kind + rng.randrange(8, 16))) for kind in range(4)]
    start, next_block, requests = 0.0, 4_000, []
    for _ in range(number):
        start += rng.expovariate(per_second)
        now, blocks = start, list(rng.choice(systems))
        tokens = len(blocks) * BLOCK_SIZE
        for _ in range(rng.randrange(5, 31)):
            tokens += min(8_000, round(rng.lognormvariate(6.5, 1.0))) + 20
            while len(blocks) < tokens // BLOCK_SIZE:
                blocks.append(next_block)
                next_block += 1
            answer = rng.randrange(30, 300)
            requests.append(_request(now, tokens, answer, list(blocks)))
            tokens += answer
            now += 0.03 * answer + rng.lognormvariate(1.4, 0.8)
    return sorted(requests, key=lambda request: request.at)


def documents(seed: int, number: int = 400, per_second: float = 0.12) -> list[Request]:
    """Return one to five questions about each of many documents of 30 to 120 thousand tokens, half a minute apart."""
    rng = random.Random(seed)
    start, next_block, requests = 0.0, 0, []
    for _ in range(number):
        start += rng.expovariate(per_second)
        now, length = start, rng.randrange(60, 240)
        document = list(range(next_block, next_block + length))
        next_block += length
        for _ in range(rng.randrange(1, 6)):
            requests.append(
                _request(now, length * BLOCK_SIZE + rng.randrange(20, 500), rng.randrange(50, 600), document)
            )
            now += rng.expovariate(1 / 30)
    return sorted(requests, key=lambda request: request.at)


def popular(seed: int, number: int = 1_200, per_second: float = 12.0) -> list[Request]:
    """Return questions of 2,000 tokens about one document of 61,000 tokens: more than one replica can answer."""
    rng = random.Random(seed)
    now, requests, document = 0.0, [], list(range(120))
    for index in range(number):
        now += rng.expovariate(per_second)
        blocks = [*document, *range(1_000 + 4 * index, 1_004 + 4 * index)]
        requests.append(_request(now, len(blocks) * BLOCK_SIZE + 50, rng.randrange(50, 300), blocks))
    return requests


def _request(at: float, input_tokens: int, output_tokens: int, blocks: list[int]) -> Request:
    return Request(at, input_tokens, output_tokens, tuple(spread(block) for block in blocks))


def spread(block: int) -> int:
    """Return a 64-bit number that resembles a hash (the finalizer of SplitMix64)."""
    block = (block + 1) * 0x9E3779B97F4A7C15 & _MASK
    block = (block ^ block >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    block = (block ^ block >> 27) * 0x94D049BB133111EB & _MASK
    return block ^ block >> 31
