"""IncrementalDetokenizer: a stream of token ids to a stream of text."""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]

_MAX_UNDECODABLE = 4  # tokens: a character has at most four bytes
_CONTEXT = 12  # tokens of the prompt: the parts of a character at both ends, and enough for any spacing rule between


class IncrementalDetokenizer:
    """Turns a stream of token ids into a stream of text.

    A token's text depends on its neighbours (leading spaces, characters split over several byte tokens), so each call
    decodes a short window twice, with and without the new tokens, and returns the difference. Tokens that end in the
    middle of a character are held back. The method is Text Generation Inference's (prefix and read offsets).
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids = list(prompt_token_ids[-_CONTEXT:])
        self._prefix_offset = 0
        self._read_offset = len(self._token_ids)
        for held_back in range(_MAX_UNDECODABLE):
            if not self._decode(0, len(self._token_ids) - held_back).endswith("\ufffd"):
                # If held_back is not 0, the prompt ends inside a character, which the answer completes.
                self._read_offset = len(self._token_ids) - held_back
                break

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Append ``token_ids`` and return the text that no later token can change; all remaining text if ``final``."""
        self._token_ids += token_ids
        before = self._decode(self._prefix_offset, self._read_offset)
        after = self._decode(self._prefix_offset, len(self._token_ids))
        undecodable = len(after) - len(after.rstrip("\ufffd"))
        if len(after) <= len(before) or (0 < undecodable < _MAX_UNDECODABLE and not final):
            return ""
        self._prefix_offset, self._read_offset = self._read_offset, len(self._token_ids)
        return after[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._token_ids[start:end], skip_special_tokens=self._skip_special_tokens)
