"""EngineLoad and EngineStats: snapshots of how busy an engine is, taken between two steps."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineLoad", "EngineStats"]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The state of an engine's queue and batch and its speed, for routers and the autoscaler. It can be pickled."""

    num_running: int  # sequences in the batch
    num_waiting: int  # requests in the queue, preempted ones included
    queued_prefill_tokens: int  # prompt tokens of waiting and running requests, neither computed nor cached
    num_blocks: int  # of the KV pool
    num_free_blocks: int  # including those that hold a cached prefix
    prefill_tokens_per_s: float  # measured; 0 before the first prefill
    decode_step_s: float  # measured time of a step that only decodes; 0 before the first one
    num_steps: int  # since the engine started; if a busy engine does not increase it, the engine is stuck


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Sequences and KV blocks by state. It can be pickled."""

    num_running: int
    num_waiting: int
    num_swapped: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
