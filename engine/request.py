"""EngineRequest: one prompt and its parameters, the same object from the ingress to ``SequenceGroup``."""

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
        output_token_ids: tokens that a lost engine has already generated for this request. The answer goes on after
            them as if this engine had generated them: penalties, the grammar, the positions of seeded sampling,
            ``min_tokens`` and ``max_tokens`` count them too.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far: those whose KV the engine needs to continue."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)
