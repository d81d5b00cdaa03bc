"""TextStream: the text of one request, while its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from engine.sampling_params import SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stop_strings import StopStringFilter
from engine.text.tokenizer import Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """Detokenises the tokens of one request, and ends the text at the first stop string.

    Args:
        tokenizer: of the model.
        prompt_token_ids: the tokens before the text.
        params: which text is wanted.
        shown_special_tokens: special tokens that are text even if ``params`` skips special tokens.

    Attributes:
        num_tokens: tokens in the text; those after a stop string are not counted.
        stop_string: the stop string that ended the text, or None. The caller then ends the request.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        shown_special_tokens: frozenset[int] = frozenset(),
    ) -> None:
        skips = params.skip_special_tokens
        self._skipped: frozenset[int] | None = None  # left out here, since the detokenizer skips all or none
        if skips and shown_special_tokens:
            self._skipped, skips = tokenizer.special_ids - shown_special_tokens, False
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens=skips)
        self._filter: StopStringFilter | None = None
        if params.stop_strings:
            self._filter = StopStringFilter(params.stop_strings, include_stop=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self.num_tokens = 0
        self.stop_string: str | None = None

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Return the text that ``token_ids`` add; with ``final``, also the text that was held back.

        As in vLLM, stop strings are searched only after the first ``min_tokens`` tokens.
        """
        if self._filter is None:
            self.num_tokens += len(token_ids)
            if self._skipped is not None:
                token_ids = self._shown(token_ids)
            return self._detokenizer.push(token_ids, final=final)
        text = ""
        for token_id in token_ids:  # one by one: the text ends with the same token however the tokens are batched
            if self.stop_string is not None:
                return text
            text += self._filtered(self._filter, token_id)
        if final:
            text += self._filter.push(self._detokenizer.push([], final=True), final=True)
            self.stop_string = self._filter.matched
        return text

    def _shown(self, token_ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in token_ids if token_id not in (self._skipped or ())]

    def _filtered(self, stop_filter: StopStringFilter, token_id: int) -> str:
        self.num_tokens += 1
        decoded = self._detokenizer.push([token_id] if self._skipped is None else self._shown([token_id]))
        if self.num_tokens <= self._min_tokens:
            return decoded
        text = stop_filter.push(decoded)
        self.stop_string = stop_filter.matched
        return text
