"""Random requests and engine options, drawn so that a short run preempts, swaps, forks, shares and evicts."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from engine.sampling_params import SamplingParams

__all__ = ["Arrival", "lone_arrival", "random_arrival", "random_options", "random_params"]


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request that arrives."""

    tokens: list[int]
    params: SamplingParams
    extends: int | None = None  # index among the latest texts, of the one that its prompt begins with
    salt: str = ""
    priority: int = 0


def random_params(rng: random.Random) -> SamplingParams:
    """Draw the parameters of a request."""
    common = {
        "max_tokens": rng.choice([1, 5, 10, 20, 40, None]),
        "stop_token_ids": rng.choice([[], [], [], [3], [1, 2, 3], list(range(0, 64, 8))]),
    }
    kind = rng.random()
    if kind < 0.2:
        width = rng.randint(1, 4)
        return SamplingParams(
            temperature=0,
            beam_width=width,
            n=rng.randint(1, width),
            length_penalty=rng.choice([-1.0, 0.0, 1.0]),
            early_stopping=rng.choice([True, False, "never"]),
            **common,
        )
    n = rng.randint(2, 4) if kind < 0.45 else 1
    return SamplingParams(
        temperature=0 if n == 1 and kind >= 0.6 else 1,
        n=n,
        best_of=rng.randint(n, 4) if kind < 0.3 else None,
        prompt_logprobs=0 if rng.random() < 0.1 else None,
        min_tokens=0 if common["max_tokens"] is None else rng.randint(0, common["max_tokens"]),
        **common,
    )


def random_arrival(rng: random.Random) -> Arrival:
    """Draw a request. Few distinct tokens, so that prompts share prefixes by chance too."""
    return Arrival(
        tokens=[rng.randint(0, 1) for _ in range(rng.choice([1, 2, 4, 8, 16, 40]))],
        params=random_params(rng),
        extends=rng.randrange(30) if rng.random() < 0.5 else None,
        salt=rng.choice(["", "", "", "a"]),
        priority=rng.randint(-1, 1),
    )


def random_options(rng: random.Random) -> dict[str, object]:
    """Draw the options of an engine whose pool is scarce."""
    block_size = rng.choice([1, 2, 4, 8])
    return {
        "block_size": block_size,
        "num_blocks": rng.randint(3 + 8 // block_size, 6 + 64 // block_size),
        "num_host_blocks": rng.choice([0, 8, 24, 80]),
        "max_num_batched_tokens": rng.choice([1, 4, 8, 16, 40]),
        "max_num_seqs": rng.choice([1, 4, 8, 12]),
        "enable_prefix_caching": rng.random() < 0.75,
        "long_prefill_threshold": rng.choice([0, 0, 3]),
        "num_draft_tokens": rng.choice([0, 1, 4, 20]),
        "free_tokens": rng.choice([None, 1, 4, 10]),
    }


def lone_arrival(rng: random.Random) -> Arrival:
    """Draw a request for one answer."""
    return replace(
        random_arrival(rng), params=SamplingParams(temperature=0, max_tokens=rng.choice([1, 5, 10, 20, 40, None]))
    )
