"""Prompt: one prompt as the beginning of a request, with the hashes that the router compares."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import EngineRequest

__all__ = ["Prompt"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready to be sent to an engine.

    Attributes:
        request: its token ids and whatever separates its cached blocks; the answer's id and parameters follow.
        block_hashes: the chained hashes of its full blocks.
        echo_text: the text that a completion with ``echo`` returns before the answer; empty otherwise.
        root: from which the hashes are derived, of the model and of what separates the request's cached blocks.
        block_size: tokens per block; 0: blocks are not hashed.
        shown_special_tokens: ids of special tokens that the answer's text shows, since its parser needs them.
    """

    request: EngineRequest
    block_hashes: list[int]
    echo_text: str = ""
    root: int = 0
    block_size: int = 0
    shown_special_tokens: frozenset[int] = frozenset()

    @property
    def token_ids(self) -> list[int]:
        """The prompt's tokens, at least one."""
        return self.request.prompt_token_ids
