"""RequestLimits: what an engine lets in.

A request that could never run is refused before it is queued, with an error that says by how much, so that whatever the
scheduler holds can be finished. It reads only what is fixed, so any thread may ask.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import KW_ONLY, dataclass

from engine.errors import PromptTooLongError, RequestError, shown
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

__all__ = ["RequestLimits"]


@dataclass(frozen=True)
class RequestLimits:
    """The limits of one engine.

    Args:
        model: its name, for messages.
        vocab_size: ids lie below it.
        max_model_len: tokens of a sequence, prompt and output together.
        num_blocks: blocks of the KV pool.
        block_size: tokens of a block.
        max_num_seqs: sequences that can run at once.
        shares_prefixes: whether the answers to one prompt share its blocks even after a recomputation.
    """

    model: str
    _: KW_ONLY
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    shares_prefixes: bool

    @property
    def capacity(self) -> int:
        """Tokens, prompt and output together, that one sequence can have at most."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    def max_total_tokens(self, num_prompt_tokens: int, width: int) -> int:
        """Return the length at which ``width`` sequences with a common prompt, alone in the pool, fill it."""
        shared = num_prompt_tokens // self.block_size if self.shares_prefixes and width > 1 else 0
        return min(self.capacity, (shared + (self.num_blocks - shared) // width) * self.block_size)

    def check(self, request: EngineRequest) -> None:
        """Refuse a request that could never run.

        Raises:
            RequestError: if the prompt is empty, an id is outside the vocabulary, an argument is of a wrong type, or
                more answers are asked for than can ever run together.
            PromptTooLongError: if the prompt leaves no room for a token in the context or the KV pool.
        """
        prompt_token_ids, output_token_ids, params = request.prompt_token_ids, request.output_token_ids, request.params
        priority, cache_salt = request.priority, request.cache_salt
        self._check_ids("prompt", prompt_token_ids)
        for name, token_ids in (("output", output_token_ids), *params.ids_by_parameter()):
            self._check_ids(name, token_ids)
        self._check_length(len(prompt_token_ids), len(output_token_ids))
        self._check_width(len(prompt_token_ids), params)
        if output_token_ids:
            self._check_output(len(output_token_ids), params)
        if params.bad_words and params.bad_words_token_ids is None:
            raise RequestError("need a tokenizer here", param="bad_words", remedy="give bad_words_token_ids")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError("must be an integer", param="priority", value=priority)
        if not isinstance(cache_salt, str) or not cache_salt.isprintable():
            raise RequestError("must be printable text", param="cache_salt", value=cache_salt)

    def _check_ids(self, name: str, token_ids: Sequence_[int]) -> None:
        vocab_size = self.vocab_size
        # The quick test first: prompts of 100,000 tokens are checked on the event loop.
        if set(map(type, token_ids)) <= {int} and (not token_ids or 0 <= min(token_ids) <= max(token_ids) < vocab_size):
            return
        wrong = next(i for i in token_ids if type(i) is not int or not 0 <= i < vocab_size)
        raise RequestError(f"has the id {shown(wrong)}", param=name, remedy=f"give ids in 0..{vocab_size - 1}")

    def _check_length(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        if num_prompt_tokens == 0:
            raise RequestError("is empty", param="prompt", remedy="give at least one token")
        length = num_prompt_tokens + num_output_tokens
        if length >= self.capacity:
            limit = "context" if self.capacity == self.max_model_len else "KV cache"
            raise PromptTooLongError(
                f"has {length} tokens, but the {limit} of '{self.model}' holds {self.capacity} with the answer",
                param="prompt",
                remedy=f"shorten it by at least {length - self.capacity + 1}",
            )

    def _check_output(self, length: int, params: SamplingParams) -> None:
        """Refuse to go on behind tokens that a request cannot have generated."""
        if params.num_sequences > 1:
            raise RequestError(
                "answers cannot continue tokens that were generated earlier",
                param="n",
                value=params.num_sequences,
                remedy="ask for one answer",
            )
        if params.max_tokens is not None and length >= params.max_tokens:
            raise RequestError(
                f"is reached: {length} tokens were generated earlier",
                param="max_tokens",
                value=params.max_tokens,
                remedy="raise it",
            )

    def _check_width(self, length: int, params: SamplingParams) -> None:
        """Refuse a request whose sequences could never run together."""
        width = params.num_sequences
        name = "beam_width" if params.uses_beam_search else "best_of" if params.best_of else "n"
        if width > self.max_num_seqs:
            raise RequestError(
                f"exceeds the {self.max_num_seqs} sequences that run at once",
                param=name,
                value=width,
                remedy="lower it",
            )
        if (holds := self.max_total_tokens(length, width)) <= length:
            raise RequestError(
                f"answers to a prompt of {length} tokens do not fit the KV cache, which holds {holds} tokens for each",
                param=name,
                value=width,
                remedy="ask for fewer",
            )
