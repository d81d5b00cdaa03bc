"""Log-probabilities in the shapes of the OpenAI API: chat, completions, and vLLM's prompt_logprobs.

It knows tokens and their bytes, but no requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

from engine.outputs import Logprob, TokenLogprobs
from engine.text.tokenizer import Tokenizer

__all__ = ["CompletionLogprobs", "chat_logprobs", "prompt_logprobs"]

LOWEST = -9999.0  # as in vLLM: JSON has no infinity


def chat_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    top: int,
    *,
    as_ids: bool = False,
) -> Any:
    """Return ``logprobs`` of a chat choice, with the ``top`` most likely tokens of each position.

    With ``as_ids``, tokens are written as ``token_id:N``.
    """
    entry = partial(_chat_entry, tokenizer, as_ids)
    content = []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        most_likely = sorted(position.items(), key=lambda item: -item[1].logprob)[:top]
        tops = [entry(*item) for item in most_likely]
        content.append(entry(token_id, position[token_id]) | {"top_logprobs": tops})
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: Tokenizer, as_ids: bool, token_id: int, logprob: Logprob) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token_id)
    token = _id_text(token_id) if as_ids else _text(spelled)
    return {"token": token, "logprob": max(logprob.logprob, LOWEST), "bytes": list(spelled)}


def prompt_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs | None], top: int
) -> list[dict[int, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: by id, the token and the ``top`` most likely ones; None for the first."""
    return [
        position
        and {token_id: _ranked(tokenizer, token_id, logprob) for token_id, logprob in islice(position.items(), 1 + top)}
        for position in logprobs
    ]


def _ranked(tokenizer: Tokenizer, token_id: int, logprob: Logprob) -> dict[str, Any]:
    text = _text(tokenizer.token_bytes(token_id))
    return {"logprob": max(logprob.logprob, LOWEST), "rank": logprob.rank, "decoded_token": text}


class CompletionLogprobs:
    """Writes ``logprobs`` of one completion choice piece by piece, and tracks the offset in its text.

    Args:
        tokenizer: for the tokens' texts.
        top: number of most likely tokens to list with each token.
        skip_special_tokens: whether the text omits special tokens.
        as_ids: write tokens as ``token_id:N``.
    """

    def __init__(
        self, tokenizer: Tokenizer, top: int, *, skip_special_tokens: bool, as_ids: bool | None = False
    ) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._num_listed = 1 + top
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """Return ``logprobs`` of the next tokens; ``text_offset`` continues from the previous call."""
        positions = list(zip(token_ids, logprobs, strict=True))
        return {
            "text_offset": [self._advance(token_id) for token_id in token_ids],
            "token_logprobs": [
                logprobs and max(logprobs[token_id].logprob, LOWEST) for token_id, logprobs in positions
            ],
            "tokens": [self._name(token_id) for token_id in token_ids],
            "top_logprobs": [logprobs and self._top(logprobs) for _, logprobs in positions],
        }

    def _name(self, token_id: int) -> str:
        return _id_text(token_id) if self._as_ids else _text(self._tokenizer.token_bytes(token_id))

    def skip_to(self, offset: int) -> None:
        """Continue at ``offset`` in the text, such as the end of the prompt."""
        self._decoder.reset()
        self._offset = offset

    def _advance(self, token_id: int) -> int:
        """Return a token's offset; a token within a character has the character's offset."""
        start = self._offset
        if not (self._skip_special_tokens and self._tokenizer.is_special(token_id)):
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return start

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        """Return the position's tokens by text; of tokens with the same text, the most likely one counts."""
        top: dict[str, float] = {}
        for token_id, one in islice(position.items(), self._num_listed):
            text = self._name(token_id)
            top[text] = max(one.logprob, top.get(text, LOWEST))
        return top


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def _text(spelled: bytes) -> str:
    return spelled.decode(errors="replace")
