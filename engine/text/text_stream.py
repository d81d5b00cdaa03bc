"""TextStream: the text of one request, while its tokens arrive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        end_token_ids: the model's EOS ids. As in vLLM, the last token is not text if it is one of them or of the
            ``stop_token_ids``, unless ``include_stop_str_in_output`` is set.

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
        *,
        end_token_ids: Iterable[int] = (),
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            shown_special_tokens=shown_special_tokens,
            keeps_first_space=params.structured_outputs is not None,
        )
        self._filter: StopStringFilter | None = None
        if params.stop_strings:
            self._filter = StopStringFilter(params.stop_strings, include_stop=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._ends = _end_tokens(params, end_token_ids) - shown_special_tokens
        self.num_tokens = 0
        self.stop_string: str | None = None

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Return the text that ``token_ids`` add; with ``final``, also the text that was held back.

        As in vLLM, stop strings are searched only after the first ``min_tokens`` tokens.
        """
        shown = self._without_end(token_ids) if final else token_ids
        if self._filter is None:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(shown, final=final)
        text = ""
        for token_id in shown:  # one by one: the text ends with the same token however the tokens are batched
            if self.stop_string is not None:
                return text
            text += self._filtered(self._filter, token_id)
        if final and self.stop_string is None:
            self.num_tokens += len(token_ids) - len(shown)
            text += self._filter.push(self._detokenizer.push([], final=True), final=True)
            self.stop_string = self._filter.matched
        return text

    def _without_end(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the last tokens without the one that ended the answer."""
        may_end = self.num_tokens + len(token_ids) > self._min_tokens
        return token_ids[:-1] if may_end and token_ids and token_ids[-1] in self._ends else token_ids

    def _filtered(self, stop_filter: StopStringFilter, token_id: int) -> str:
        self.num_tokens += 1
        decoded = self._detokenizer.push([token_id])
        if self.num_tokens <= self._min_tokens:
            return decoded
        text = stop_filter.push(decoded)
        self.stop_string = stop_filter.matched
        return text


def _end_tokens(params: SamplingParams, end_token_ids: Iterable[int]) -> frozenset[int]:
    """Return the tokens that may end the answer without being text."""
    if params.include_stop_str_in_output:
        return frozenset()
    ends = () if params.ignore_eos and params.structured_outputs is None else end_token_ids
    return frozenset((*ends, *(params.stop_token_ids or ())))
