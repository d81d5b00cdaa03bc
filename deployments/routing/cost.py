"""The cost of a prompt on a replica, in seconds before first tokens, of this request and of those that it delays:

    cost    = queue + (1 + price) * prefill + decode / F

    queue   = queued tokens / P          prompt tokens that the replica computes before; P is its measured prefill rate
    prefill = uncached tokens / P        those of this prompt, at least one
    price                                what a second of prefill costs the cluster's other requests (cluster_load.py)
    decode  = (1 + reuse) * L * (base + (2n + 1) * sequence + kv * (K + (n + 1) * tokens))
                                         the steps of this answer, and what it adds to those of the answers beside it
    F       = RoutingOptions.first_token_weight

L is the expected length of the answer, n the number of answers on the replica and K the tokens in their contexts,
``reuse`` how often a computed token is used again. ``base``, ``sequence`` and ``kv`` are the replica's StepCosts: with
this answer everyone's step takes ``base + (n + 1) * sequence + kv * (K + tokens)`` seconds, and without it the steps of
the n others take ``sequence + kv * tokens`` less.

Preble (Srivatsa et al., 2024) adds the queue to the prefill in seconds; the price and the part of the others are ours.
Arithmetic only: what is queued and cached comes from the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.kv.events import StorageName
from engine.observability.step_costs import StepCosts

__all__ = [
    "Fetch",
    "Holder",
    "Prices",
    "PromptBlocks",
    "PromptCost",
    "ReplicaCost",
    "prompt_cost",
    "prompt_costs",
]


class PromptBlocks(NamedTuple):
    """A prompt as the router sees it: its length and block hashes."""

    num_tokens: int
    hashes: Sequence[int]  # of its full blocks, in order
    block_size: int  # tokens per block


class Prices(NamedTuple):
    """What is the same on all replicas."""

    prefill: float = 0.0  # price
    decode: float = 0.0  # (1 + reuse) * L / F
    memory: float = 0.0  # the part of ``prefill`` for the blocks that a stored one evicts


class Holder(NamedTuple):
    """A replica from which others can read pages."""

    name: str
    endpoint: str  # where it serves them
    secret: str  # that it asks for
    num_blocks: int  # leading blocks of the prompt that it has reported to hold


class Fetch(NamedTuple):
    """A part of a prompt that a replica fetches before it computes the rest: see fetches.py."""

    source: Holder | StorageName  # another replica, or storage that the replica reads itself
    num_blocks: int  # leading blocks of the prompt that the replica holds afterwards
    num_fetched: int  # of them
    seconds: float  # that the fetch takes
    evicted_s: float  # to compute again what it evicts
    saved_s: float  # how much less the prompt costs than if it is computed

    @property
    def holder(self) -> Holder | None:
        """The other replica; None: the source is storage."""
        return None if isinstance(self.source, str) else self.source

    @property
    def source_name(self) -> str:
        """The name of the other replica, or of the storage."""
        return self.source if isinstance(self.source, str) else self.source.name


class PromptCost(NamedTuple):
    """The parts of a cost, in seconds."""

    queue_s: float
    prefill_s: float
    others_s: float  # price * prefill, and what a fetch evicts
    decode_s: float  # decode / F
    fetch_s: float = 0.0  # that a fetch takes longer than the queue

    @property
    def first_token_s(self) -> float:
        """Seconds until the first token."""
        return self.queue_s + self.fetch_s + self.prefill_s


class ReplicaCost:
    """The numbers of a replica that the cost of any prompt needs, updated when the replica's load changes."""

    __slots__ = ("kv_token_s", "queue_s", "seconds_per_token", "step_s")

    def __init__(self) -> None:
        self.seconds_per_token = 1.0  # 1 / P
        self.queue_s = 0.0
        self.step_s = 0.0  # base + (2n + 1) * sequence + kv * K
        self.kv_token_s = 0.0  # (n + 1) * kv

    def update(
        self,
        *,
        queued_tokens: int,
        seconds_per_token: float,
        num_answers: int = 0,
        num_context_tokens: int = 0,
        costs: StepCosts | None = None,
    ) -> None:
        """Take in the load of the replica; ``costs`` is None while nothing is known of its steps."""
        self.seconds_per_token = seconds_per_token
        self.queue_s = queued_tokens * seconds_per_token
        self.step_s = self.kv_token_s = 0.0
        if costs is not None:
            self.step_s = costs.base_s + (2 * num_answers + 1) * costs.sequence_s
            self.step_s += costs.kv_token_s * num_context_tokens
            self.kv_token_s = (num_answers + 1) * costs.kv_token_s

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """The numbers as ``prompt_costs`` takes them: queue, seconds per token, step, KV token."""
        return self.queue_s, self.seconds_per_token, self.step_s, self.kv_token_s


def prompt_costs(
    columns: Sequence[npt.NDArray[np.float64]],
    prompt: PromptBlocks,
    num_cached_blocks: npt.NDArray[np.float64] | None,
    prices: Prices,
) -> npt.NDArray[np.float64]:
    """Return the cost of ``prompt`` on each of many replicas; shape [num_replicas].

    Few operations on whole arrays, because each takes about as long for 64 replicas as for one, and few kinds of them,
    because the code of each has to come into the processor's caches. They add up in the same order for every replica:
    equal replicas cost exactly the same.

    Args:
        columns: the numbers of the replicas, in the order of ``ReplicaCost.numbers``; four of shape [num_replicas].
        prompt: the prompt.
        num_cached_blocks: how many leading blocks of the prompt each replica has cached; None: none has any.
        prices: what is the same on all replicas.
    """
    weight, steps = 1 + prices.prefill, prices.decode
    queue_s, seconds_per_token, step_s, kv_token_s = columns
    if num_cached_blocks is None:
        costs = seconds_per_token * (weight * max(1, prompt.num_tokens))
    else:
        costs = num_cached_blocks * (-weight * prompt.block_size)
        costs += weight * prompt.num_tokens
        np.maximum(costs, weight, out=costs)  # the last token is computed even if it is cached: its logits are needed
        costs *= seconds_per_token
    costs += queue_s
    costs += step_s * steps
    costs += kv_token_s * (steps * prompt.num_tokens)
    return costs


def prompt_cost(
    replica: ReplicaCost, prompt: PromptBlocks, num_cached_blocks: int, prices: Prices, fetch: Fetch | None = None
) -> PromptCost:
    """Return the parts of the cost of ``prompt`` on one replica, which computes what it has not cached or fetches."""
    num_known = num_cached_blocks if fetch is None else fetch.num_blocks
    prefill_s = replica.seconds_per_token * max(1, prompt.num_tokens - num_known * prompt.block_size)
    others_s = prices.prefill * prefill_s
    decode_s = prices.decode * (replica.step_s + replica.kv_token_s * prompt.num_tokens)
    if fetch is None:
        return PromptCost(replica.queue_s, prefill_s, others_s, decode_s)
    fetch_s = max(0.0, fetch.seconds - replica.queue_s)
    return PromptCost(replica.queue_s, prefill_s, others_s + fetch.evicted_s, decode_s, fetch_s)
