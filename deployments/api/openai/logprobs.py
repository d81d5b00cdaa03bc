"""Log-probabilities in the shapes of the OpenAI API: chat, completions, and vLLM's prompt_logprobs.

It knows tokens and their bytes, but no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from engine.outputs import Logprob, TokenLogprobs
from engine.text.detokenizer import IncrementalDetokenizer
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
    """Return ``logprobs`` of a chat choice, with the ``top`` most likely tokens of each position; -1 for all.

    With ``as_ids``, tokens are written as ``token_id:N``.
    """
    entry = partial(_chat_entry, tokenizer, as_ids)
    content = []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        most_likely = sorted(position.items(), key=lambda item: -item[1].logprob)[: _limit(top)]
        tops = [entry(*item) for item in most_likely]
        content.append(entry(token_id, position[token_id]) | {"top_logprobs": tops})
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: Tokenizer, as_ids: bool, token_id: int, logprob: Logprob) -> dict[str, Any]:
    token = _id_text(token_id) if as_ids else tokenizer.token_bytes.name(token_id)
    return {"token": token, "logprob": max(logprob.logprob, LOWEST), "bytes": list(tokenizer.token_bytes(token_id))}


def prompt_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs | None], top: int
) -> list[dict[int, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: by id, the token and the ``top`` most likely ones; None for the first.

    With ``top`` -1, these are all.
    """
    return [
        position
        and {
            token_id: _ranked(tokenizer, token_id, logprob)
            for token_id, logprob in islice(position.items(), _limit(top, 1))
        }
        for position in logprobs
    ]


def _limit(top: int, others: int = 0) -> int | None:
    """Return the number of the ``top`` most likely tokens and ``others``, as the end of a slice."""
    return None if top == -1 else top + others


def _ranked(tokenizer: Tokenizer, token_id: int, logprob: Logprob) -> dict[str, Any]:
    name = tokenizer.token_bytes.name(token_id)
    return {"logprob": max(logprob.logprob, LOWEST), "rank": logprob.rank, "decoded_token": name}


class CompletionLogprobs:
    """Writes ``logprobs`` of one completion choice piece by piece, and tracks the offset in its text.

    Args:
        tokenizer: for the tokens' texts.
        top: number of most likely tokens to list with each token; -1 for all.
        skip_special_tokens: whether the text omits special tokens.
        as_ids: write tokens as ``token_id:N``.
        prompt_token_ids: the tokens before the answer.
        keeps_first_space: as in ``IncrementalDetokenizer``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        top: int,
        *,
        skip_special_tokens: bool,
        as_ids: bool | None = False,
        prompt_token_ids: Sequence[int] = (),
        keeps_first_space: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._num_listed = _limit(top, 1)
        self._detokenizer = partial(IncrementalDetokenizer, tokenizer, skip_special_tokens=skip_special_tokens)
        self._answer = self._detokenizer(prompt_token_ids, keeps_first_space=keeps_first_space)
        self._offset = 0

    def add_prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], text: str
    ) -> dict[str, list[Any]]:
        """Return ``logprobs`` of the echoed prompt; the answer's offsets continue after its ``text``.

        The text may lack what the tokenizer adds: special tokens, and a space before the first word.
        """
        written = self._write(self._detokenizer([]), token_ids, logprobs)
        added = max(0, self._text_of(token_ids).find(text))
        written["text_offset"] = [min(max(0, offset - added), len(text)) for offset in written["text_offset"]]
        self._offset = len(text)
        return written

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """Return ``logprobs`` of the next tokens; ``text_offset`` continues from the previous call."""
        return self._write(self._answer, token_ids, logprobs)

    def _text_of(self, token_ids: Sequence[int]) -> str:
        return self._detokenizer([]).push(token_ids, final=True)

    def _write(
        self, text: IncrementalDetokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        written: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, position in zip(token_ids, logprobs, strict=True):
            name = self._naming(at_start=text.at_start)
            written["text_offset"].append(self._offset)  # a token within a character has the character's offset
            written["token_logprobs"].append(position and max(position[token_id].logprob, LOWEST))
            written["tokens"].append(name(token_id))
            written["top_logprobs"].append(position and self._top(position, name))
            self._offset += len(text.push([token_id]))
        return written

    def _naming(self, *, at_start: bool) -> Callable[[int], str]:
        """Return the function that writes a token of one position."""
        return _id_text if self._as_ids else partial(self._tokenizer.token_bytes.name, at_start=at_start)

    def _top(self, position: TokenLogprobs, name: Callable[[int], str]) -> dict[str, float]:
        """Return the position's tokens by text; of tokens with the same text, the most likely one counts."""
        top: dict[str, float] = {}
        for token_id, logprob in islice(position.items(), self._num_listed):
            text = name(token_id)
            top[text] = max(logprob.logprob, top.get(text, LOWEST))
        return top


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"
