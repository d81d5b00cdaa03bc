"""Prompt: one prompt as token ids, with the hashes that the router compares."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Prompt"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready to be sent to an engine.

    Attributes:
        token_ids: at least one token id.
        block_hashes: the chained hashes of its full blocks.
        shown_special_tokens: ids of special tokens that the answer's text shows, since its parser needs them.
        echo_text: the text that a completion with ``echo`` returns before the answer; empty otherwise.
    """

    token_ids: list[int]
    block_hashes: list[int]
    echo_text: str = ""
    shown_special_tokens: frozenset[int] = frozenset()
