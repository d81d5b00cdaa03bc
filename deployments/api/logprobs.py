"""Log-probabilities as the OpenAI API writes them: the shapes of chat, of completions, and vLLM's prompt_logprobs.

It knows tokens and their bytes, and nothing of requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import islice
from typing import Any

from engine.outputs import Logprob, TokenLogprobs
from engine.text.tokenizer import Tokenizer

__all__ = ["CompletionLogprobs", "chat_logprobs", "prompt_logprobs"]

LOWEST = -9999.0  # as in vLLM: JSON has no infinity


def chat_logprobs(tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int) -> Any:
    """Return ``logprobs`` of a chat's choice, with the ``top`` likeliest tokens of each position."""
    content = []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        likeliest = sorted(position.items(), key=lambda item: -item[1].logprob)[:top]
        entry = _chat_entry(tokenizer, token_id, position[token_id])
        content.append(entry | {"top_logprobs": [_chat_entry(tokenizer, *item) for item in likeliest]})
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: Logprob) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token_id)
    return {"token": _text(spelled), "logprob": max(logprob.logprob, LOWEST), "bytes": list(spelled)}


def prompt_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs | None], top: int
) -> list[dict[int, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: for each token but the first, a map of its id and the likeliest ones."""
    return [
        position
        and {token_id: _ranked(tokenizer, token_id, one) for token_id, one in islice(position.items(), 1 + top)}
        for position in logprobs
    ]


def _ranked(tokenizer: Tokenizer, token_id: int, logprob: Logprob) -> dict[str, Any]:
    text = _text(tokenizer.token_bytes(token_id))
    return {"logprob": max(logprob.logprob, LOWEST), "rank": logprob.rank, "decoded_token": text}


class CompletionLogprobs:
    """Writes ``logprobs`` of one choice of a completion, piece by piece, and keeps its place in the text.

    Args:
        tokenizer: for the tokens' texts.
        top: how many of the likeliest tokens are told besides each token.
        skip_special_tokens: whether special tokens are left out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, top: int, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._num_told = 1 + top
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """Return the next tokens' part; ``text_offset`` counts on from the part before."""
        positions = list(zip(token_ids, logprobs, strict=True))
        return {
            "text_offset": [self._advance(token_id) for token_id in token_ids],
            "token_logprobs": [one and max(one[token_id].logprob, LOWEST) for token_id, one in positions],
            "tokens": [_text(self._tokenizer.token_bytes(token_id)) for token_id in token_ids],
            "top_logprobs": [one and self._top(one) for _, one in positions],
        }

    def skip_to(self, offset: int) -> None:
        """Go on at a place in the text that is known: the end of the prompt."""
        self._decoder.reset()
        self._offset = offset

    def _advance(self, token_id: int) -> int:
        """Return where a token begins; a part of a character begins where the character does."""
        start = self._offset
        if not (self._skip_special_tokens and self._tokenizer.is_special(token_id)):
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return start

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        """Return the position's tokens by their text; of several with the same text the likeliest."""
        top: dict[str, float] = {}
        for token_id, one in islice(position.items(), self._num_told):
            text = _text(self._tokenizer.token_bytes(token_id))
            top[text] = max(one.logprob, top.get(text, LOWEST))
        return top


def _text(spelled: bytes) -> str:
    return spelled.decode(errors="replace")
