"""StepEngine: what AsyncEngine drives: the engine that generates text, or the one that computes vectors and scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.config import EngineConfig, EngineInfo
from engine.errors import OverloadedError
from engine.kv.block_pool import Block
from engine.observability.load import EngineLoad, EngineStats
from engine.outputs import StepOutputs
from engine.request import EngineRequest
from engine.structured_outputs.grammar import Grammar
from engine.structured_outputs.service import GrammarService

__all__ = ["StepEngine"]


class Meter(Protocol):
    """How busy an engine is and how fast it computes."""

    @property
    def num_changes(self) -> int:
        """Requests that have arrived, and requests that have left."""

    def load(self) -> EngineLoad:
        """Return the numbers as they are now."""

    def stats(self) -> EngineStats:
        """Count sequences and blocks by state."""


class Runner(Protocol):
    """Computes the steps."""

    def check_health(self) -> None:
        """Raise EngineDeadError if no step can be computed any more."""


class StepEngine(Protocol):
    """One model and its requests. A single thread calls it, but any thread may call ``check_request``.

    Attributes:
        config: its options.
        info: the model and the engine's sizes.
    """

    config: EngineConfig
    info: EngineInfo

    @property
    def runner(self) -> Runner:
        """Computes the steps."""

    @property
    def meter(self) -> Meter:
        """How busy the engine is."""

    @property
    def grammars(self) -> GrammarService | None:
        """Compiles structured outputs; None: it generates no text."""

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks of its KV pool."""

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""

    @property
    def can_step(self) -> bool:
        """Whether a step would do anything now; False too while all requests wait for something else."""

    def forward_calls(self, post: Callable[[Callable[[], None]], None]) -> None:
        """Let the engine's background threads bring their results through ``post``, which wakes the step thread."""

    def check_request(self, request: EngineRequest) -> None:
        """Reject a request that can never run."""

    def queue_request(
        self,
        request: EngineRequest,
        *,
        grammar: Grammar | None = None,
        on_rejected: Callable[[str, OverloadedError], None] | None = None,
        arrived: float | None = None,
    ) -> object:
        """Queue a request that ``check_request`` has accepted."""

    def abort(self, request_id: str) -> bool:
        """End a request; False if it is unknown."""

    def step(self) -> StepOutputs:
        """Compute one batch, and return what it has given."""

    def close(self) -> None:
        """End what belongs to the engine."""
