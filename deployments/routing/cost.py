"""The cost of a prompt on a replica, in seconds:

    cost    = queue_s + (1 + w) * uncached / P
    queue_s = queued_prefill / P + beta * decode_pressure

    P                the replica's prefill rate in tokens per second
    uncached         prompt tokens that the replica has to compute, at least one
    w                RoutingOptions.miss_weight: a computed token also delays the requests queued after it
    queued_prefill   prompt tokens queued on the replica
    decode_pressure  how crowded its batch and its KV pool are (ReplicaLoad.decode_pressure), in seconds
    beta             RoutingOptions.decode_weight

After Preble (Srivatsa et al., 2024) and LMetric (OSDI'26). Arithmetic only: what is queued and cached comes from the
caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["PromptBlocks", "ReplicaCost", "prompt_costs"]


class PromptBlocks(NamedTuple):
    """A prompt as the router sees it: its length and block hashes."""

    num_tokens: int
    hashes: Sequence[int]  # of its full blocks, in order
    block_size: int  # tokens per block


class ReplicaCost:
    """The two numbers of a replica that the cost of any prompt needs, updated when the replica's load changes."""

    __slots__ = ("queue_s", "seconds_per_token")

    def __init__(self) -> None:
        self.seconds_per_token = 1.0  # 1 / P
        self.queue_s = 0.0

    def update(
        self, *, queued_tokens: int, seconds_per_token: float, decode_pressure: float, decode_weight: float
    ) -> None:
        """Compute the cost of an empty prompt."""
        self.seconds_per_token = seconds_per_token
        self.queue_s = queued_tokens * seconds_per_token + decode_weight * decode_pressure


def prompt_costs(
    candidates: Sequence[str],
    replicas: Mapping[str, ReplicaCost],
    prompt: PromptBlocks,
    num_cached_blocks: Mapping[str, int],
    miss_weight: float,
) -> dict[str, float]:
    """Return the cost of ``prompt`` on each candidate.

    Args:
        candidates: names of replicas.
        replicas: at least the candidates.
        prompt: the prompt.
        num_cached_blocks: how many leading blocks of the prompt each replica has cached; absent means none.
        miss_weight: w.
    """
    weight = 1 + miss_weight
    all_tokens = weight * max(1, prompt.num_tokens)
    if not num_cached_blocks:
        return {name: replicas[name].queue_s + replicas[name].seconds_per_token * all_tokens for name in candidates}
    # The last token is computed even if its block is cached: its logits are needed.
    max_saved, saved_per_block = weight * max(0, prompt.num_tokens - 1), weight * prompt.block_size
    costs, blocks_of = {}, num_cached_blocks.get
    for name in candidates:
        replica = replicas[name]
        saved = blocks_of(name, 0) * saved_per_block
        tokens = all_tokens - (saved if saved < max_saved else max_saved)
        costs[name] = replica.queue_s + replica.seconds_per_token * tokens
    return costs
