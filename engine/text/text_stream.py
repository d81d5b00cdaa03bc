"""TextStream: the text of one request, while its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from engine.sampling_params import SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stop_strings import StopStringFilter
from engine.text.tokenizer import Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """Detokenises the tokens of one request, and ends the text at the first stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._filter = StopStringFilter(params.stop_strings, include_stop=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        # With stop strings, token by token: the text then ends with the same token however the tokens are batched.
        self._token_by_token = bool(params.stop_strings)
        self.num_tokens = 0  # in the text; tokens after a stop string are not counted

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, or None. The caller then ends the request."""
        return self._filter.matched

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Return the text that ``token_ids`` add; with ``final``, also the text that was held back.

        As in vLLM, stop strings are searched only after the first ``min_tokens`` tokens.
        """
        pieces = [token_ids[i : i + 1] for i in range(len(token_ids))] if self._token_by_token else [token_ids]
        text = ""
        for piece in pieces:
            if self.stop_string is not None:
                return text
            self.num_tokens += len(piece)
            decoded = self._detokenizer.push(piece)
            text += decoded if self.num_tokens <= self._min_tokens else self._filter.push(decoded)
        return text + self._filter.push(self._detokenizer.push([], final=True), final=True) if final else text
