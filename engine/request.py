"""EngineRequest: one prompt and its parameters, spelled once on its way from the ingress to ``SequenceGroup``."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.sampling_params import SamplingParams

__all__ = ["EngineRequest"]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request to an engine. It pickles.

    Attributes:
        request_id: unique among the unfinished requests of an engine.
        prompt_token_ids: at least one token id.
        params: how to sample and when to stop.
        priority: higher is more important.
        cache_salt: requests share cached blocks only under equal salts.
        output_token_ids: tokens that an engine which was lost has generated. They are replayed, and with them
            penalties, the grammar's state and the positions that the seed counts; the answer goes on after them with
            the same parameters, of which ``max_tokens`` and the like count these tokens too.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the engine needs before it can generate the next one."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)
