"""EngineLoad and EngineStats: snapshots of how busy an engine is, taken between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from engine.observability.step_costs import StepCosts

__all__ = ["MAX_SOURCE_RATES", "EngineLoad", "EngineStats", "SourceRate"]

MAX_SOURCE_RATES = 8  # of a report


_Count: TypeAlias = Annotated[int, Meta(ge=0)]
_Measure: TypeAlias = Annotated[float, Meta(ge=0, le=1e15)]  # excludes NaN and infinity


class SourceRate(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """How fast the engine has fetched KV from one source, on average over the latest transfers. It can be pickled."""

    source: Annotated[str, Meta(max_length=256)]  # where a peer serves its pages; or ``disk`` or ``shared``
    latency_s: _Measure  # from the request to the first page
    tokens_per_s: _Measure  # after that; 0: not measured yet
    num_transfers: _Count = 0  # that were measured: shows that the rate is new although it is the same


class EngineLoad(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The state of an engine's queue and batch and its speed, for routers and the autoscaler. It can be pickled."""

    num_running: _Count  # sequences in the batch
    num_waiting: _Count  # requests in the queue, preempted ones included
    queued_prefill_tokens: _Count  # prompt tokens of waiting and running requests, neither computed nor cached
    num_blocks: _Count  # of the KV pool
    num_free_blocks: _Count  # including those that hold a cached prefix
    prefill_tokens_per_s: _Measure  # measured; 0 before the first prefill
    num_steps: _Count  # since the engine started; if a busy engine does not increase it, the engine is stuck
    num_decoding: _Count = 0  # answers that every step continues
    num_decoding_tokens: _Count = 0  # in their contexts
    num_pending: _Count = 0  # answers whose prompts are not computed yet
    num_pending_tokens: _Count = 0  # in their contexts
    step_costs: StepCosts = StepCosts()  # measured
    source_rates: Annotated[tuple[SourceRate, ...], Meta(max_length=MAX_SOURCE_RATES)] = ()  # the latest measured


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Sequences and KV blocks by state. It can be pickled."""

    num_running: int
    num_waiting: int
    num_swapped: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
