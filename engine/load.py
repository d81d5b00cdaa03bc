"""EngineLoad: how busy an engine is, as routers and the autoscaler want to know it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineLoad"]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Plain numbers, taken between two steps. It pickles."""

    num_running: int  # sequences in the batch
    num_waiting: int  # requests in the queue, preempted ones included
    queued_prefill_tokens: int  # prompt tokens still to be computed, of waiting and running requests, cached ones not
    num_blocks: int  # of the KV pool
    num_free_blocks: int  # those that hold a cached prefix included
    prefill_tokens_per_s: float  # measured; 0 until a prefill was seen
    decode_step_s: float  # measured time of a step that only decodes; 0 until one was seen
    num_steps: int  # since the engine began: what moves is alive
