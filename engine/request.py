"""EngineRequest, a prompt and its parameters on the way from the ingress to ``SequenceGroup``, and its validation.

A request that can never run is rejected with an error that states the limit, so the scheduler can finish every request
that it holds. The validators read only constants, so any thread may call them. The ingress checks a prompt with the
same code, before the request travels to an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from msgspec import Struct

from engine.errors import MAX_LISTED, PromptTooLongError, RequestError, listed
from engine.kv.prefix_hash import root_hash
from engine.pooling.params import PoolingParams
from engine.sampling_params import SamplingParams

__all__ = ["MAX_RETENTION", "EngineRequest", "KVSource", "PromptValidator", "RequestValidator"]

MAX_RETENTION: Final = 3


class KVSource(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Another engine that holds the beginning of a prompt, chosen by the router.

    Attributes:
        endpoint: where it serves its pages, ``tcp://host:port``.
        secret: without which it refuses to.
        num_tokens: of the prompt, from its first, that it is expected to hold.
    """

    endpoint: str
    secret: str
    num_tokens: int


class EngineRequest(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One request to an engine, in the ingress, on the wire and in the engine.

    Attributes:
        request_id: unique among the unfinished requests of an engine.
        prompt_token_ids: at least one token id.
        params: how to sample and when to stop.
        priority: higher is more important.
        cache_salt: requests share cached blocks only under equal salts.
        client: who sent it; the waiting requests of several clients start in turns (engine/scheduling/client_turns.py).
        output_token_ids: tokens that a lost engine has already generated for this request. The answer continues
            after them as if this engine had generated them: penalties, the grammar, the positions of seeded sampling,
            ``min_tokens`` and ``max_tokens`` count them too.
        prediction_token_ids: what the client expects as the answer. It makes drafts, and changes no answer.
        pooling: what is wanted of the prompt's hidden states, from an engine that generates nothing; None: an answer.
        kv_source: from which the engine may read the KV of the prompt's beginning; None: it computes what it lacks.
        retention: how many times its cached blocks are spared when they would be evicted, 0 to ``MAX_RETENTION``.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams = SamplingParams()
    priority: int = 0
    cache_salt: str = ""
    client: str = ""
    output_token_ids: list[int] = []
    prediction_token_ids: list[int] = []
    pooling: PoolingParams | None = None
    kv_source: KVSource | None = None
    retention: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far: those whose KV the engine needs to continue."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def cache_key(self) -> str:
        """What separates the caches of one model's requests: they share blocks only under equal keys.

        Whatever separates caches enters here, and nowhere else: the block hashes are derived from the key. Several
        names are joined by a newline, which none of them contains (``PromptValidator.check_cache_key``).
        """
        return self.cache_salt

    def cache_root(self, model: str) -> int:
        """Return the root of the block hashes, in the engine's cache and in the router's index."""
        return root_hash(model, self.cache_key)


@dataclass(frozen=True, kw_only=True)
class PromptValidator:
    """The rules for token ids and for the length of a prompt.

    Args:
        model: name of the model, for messages.
        vocab_size: token ids are less than this.
        max_model_len: maximum tokens of a sequence, prompt and output together.
        num_blocks: blocks of the KV pool; 0: there is none.
        block_size: tokens per block.
        max_logprobs: most log-probabilities of a token; -1 sets no limit.
    """

    model: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_logprobs: int

    @property
    def capacity(self) -> int:
        """Maximum tokens, prompt and output together, of one sequence."""
        return min(self.max_model_len, self.num_blocks * self.block_size) if self.num_blocks else self.max_model_len

    def check_text(self, token_ids: Sequence[int], param: str = "input") -> None:
        """Check the token ids of a text that no answer follows.

        Raises:
            RequestError: if the text is empty, or an id is not in the vocabulary.
            PromptTooLongError: if it is longer than the context.
        """
        if not token_ids:
            raise RequestError("is empty", param=param, value=[], remedy="give at least one token")
        if len(token_ids) > self.max_model_len:
            raise PromptTooLongError(
                f"has {len(token_ids)} tokens, but the context of '{self.model}' holds {self.max_model_len}",
                param=param,
                remedy="shorten it, or set truncate_prompt_tokens",
            )
        self.check_token_ids(param, token_ids)  # last: it takes long for what is far too long

    def check_prompt(self, token_ids: Sequence[int], param: str = "prompt") -> None:
        """Check the token ids of a prompt.

        Args:
            token_ids: the prompt.
            param: the parameter that the error names.

        Raises:
            RequestError: if the prompt is empty, or an id is not in the vocabulary.
            PromptTooLongError: if the prompt leaves no space for an output token in the context or the KV pool.
        """
        self._check_length(len(token_ids), 0, param)
        self.check_token_ids(param, token_ids)  # last: it takes long for what is far too long

    def check_token_ids(self, param: str, token_ids: Sequence[int]) -> None:
        """Raise RequestError unless all ``token_ids`` are in the vocabulary."""
        # Three passes in C: prompts of 100,000 tokens are checked on the event loop.
        is_integral = set(map(type, token_ids)) <= {int}
        if is_integral and (not token_ids or 0 <= min(token_ids) <= max(token_ids) < self.vocab_size):
            return
        wrong = (i for i in token_ids if type(i) is not int or not 0 <= i < self.vocab_size)
        remedy = f"give ids in the vocabulary, 0..{self.vocab_size - 1}"
        raise RequestError(f"has the id {listed(list(islice(wrong, MAX_LISTED)))}", param=param, remedy=remedy)

    def check_params(self, params: SamplingParams) -> None:
        """Check sampling parameters with what is known of the model.

        Raises:
            RequestError: for a token id outside the vocabulary, or more log-probabilities than ``max_logprobs``.
        """
        for name, token_ids in params.ids_by_parameter():
            self.check_token_ids(name, token_ids)
        self._check_num_logprobs("logprobs", params.logprobs)
        self._check_num_logprobs("prompt_logprobs", params.prompt_logprobs)

    def _check_num_logprobs(self, param: str, number: int | None) -> None:
        if number is None or self.max_logprobs == -1:
            return
        wanted = self.vocab_size if number == -1 else number
        if wanted > self.max_logprobs:
            asks = f"asks for all {wanted} tokens of the vocabulary, which exceed" if number == -1 else "exceeds"
            raise RequestError(
                f"{asks} the limit of {self.max_logprobs}",
                param=param,
                value=number,
                remedy=f"ask for at most {self.max_logprobs}, or raise the engine's max_logprobs",
            )

    def check_cache_key(self, request: EngineRequest) -> None:
        """Raise RequestError unless what separates the request's cached blocks is valid."""
        salt = request.cache_salt
        if not isinstance(salt, str) or not salt.isprintable():
            raise RequestError("must be printable text", param="cache_salt", value=salt)

    def _check_length(self, num_prompt_tokens: int, num_output_tokens: int, param: str = "prompt") -> None:
        if num_prompt_tokens == 0:
            raise RequestError("is empty", param=param, value=[], remedy="give at least one token")
        length = num_prompt_tokens + num_output_tokens
        if length >= self.capacity:
            limit = "context" if self.capacity == self.max_model_len else "KV cache"
            raise PromptTooLongError(
                f"has {length} tokens, but the {limit} of '{self.model}' holds {self.capacity} with the answer",
                param=param,
                remedy=f"shorten it by at least {length - self.capacity + 1}",
            )


@dataclass(frozen=True, kw_only=True)
class RequestValidator(PromptValidator):
    """The rules of one engine for a whole request.

    Args:
        max_num_seqs: maximum sequences that run at once.
        shares_prefixes: whether the sequences of one prompt share its blocks even after a recomputation.
        windows: of each sliding window with pages of its own, the pages in reach of a sequence, and those of its pool.
        step_pages: pages of a window, at most, that a step writes to beside those in reach.
    """

    max_num_seqs: int
    shares_prefixes: bool
    windows: tuple[tuple[int, int], ...] = ()
    step_pages: int = 0

    @property
    def capacity(self) -> int:
        """Maximum tokens, prompt and output together, of one sequence."""
        return min(super().capacity, self._num_blocks_for(1) * self.block_size)

    def _num_blocks_for(self, num_sequences: int) -> int:
        """Return the blocks that ``num_sequences`` sequences can have together.

        If not all of them can hold the pages in reach of a window, they must fit with all their pages.
        """
        scarce = [pages for reach, pages in self.windows if num_sequences * reach + self.step_pages > pages]
        return min([self.num_blocks, *scarce])

    def max_total_tokens(self, num_prompt_tokens: int, num_sequences: int) -> int:
        """Return the length at which ``num_sequences`` of one prompt, with no other request, fill the KV pool."""
        shared = num_prompt_tokens // self.block_size if self.shares_prefixes and num_sequences > 1 else 0
        num_blocks = self._num_blocks_for(num_sequences)
        return min(self.capacity, (shared + (num_blocks - shared) // num_sequences) * self.block_size)

    def check(self, request: EngineRequest) -> None:
        """Reject a request that can never run.

        Raises:
            RequestError: if the prompt is empty, an id is not in the vocabulary, a field has a wrong type, or the
                request needs more sequences than can ever run together.
            PromptTooLongError: if the prompt leaves no space for an output token in the context or the KV pool.
        """
        params, priority = request.params, request.priority
        num_prompt_tokens, num_output_tokens = len(request.prompt_token_ids), len(request.output_token_ids)
        self.check_token_ids("prompt", request.prompt_token_ids)
        self.check_token_ids("output", request.output_token_ids)
        self.check_token_ids("prediction", request.prediction_token_ids)
        self.check_params(params)
        self._check_length(num_prompt_tokens, num_output_tokens)
        self._check_num_sequences(num_prompt_tokens, params)
        if num_output_tokens:
            _check_output(num_output_tokens, params)
        if params.bad_words and params.bad_words_token_ids is None:
            raise RequestError("need a tokenizer here", param="bad_words", remedy="give bad_words_token_ids")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError("must be an integer", param="priority", value=priority)
        if type(request.retention) is not int or not 0 <= request.retention <= MAX_RETENTION:
            problem = f"must be an integer from 0 to {MAX_RETENTION}"
            raise RequestError(problem, param="retention", value=request.retention)
        self.check_cache_key(request)

    def _check_num_sequences(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Reject a request whose sequences can never run together."""
        width = params.num_sequences
        name = "beam_width" if params.uses_beam_search else "best_of" if params.best_of else "n"
        if width > self.max_num_seqs:
            limit = f"exceeds the {self.max_num_seqs} sequences that run at once"
            raise RequestError(limit, param=name, value=width, remedy="lower it")
        if (fitting := self.max_total_tokens(num_prompt_tokens, width)) <= num_prompt_tokens:
            raise RequestError(
                f"answers to a prompt of {num_prompt_tokens} tokens do not fit the KV cache, which holds {fitting} "
                "tokens of each",
                param=name,
                value=width,
                remedy="request fewer",
            )


def _check_output(num_output_tokens: int, params: SamplingParams) -> None:
    """Reject continuing an output that these parameters cannot have produced."""
    if params.num_sequences > 1:
        problem = "answers cannot continue tokens that were generated earlier"
        raise RequestError(problem, param="n", value=params.num_sequences, remedy="request one answer")
    if params.max_tokens is not None and num_output_tokens >= params.max_tokens:
        problem = f"is reached: {num_output_tokens} tokens were generated earlier"
        raise RequestError(problem, param="max_tokens", value=params.max_tokens, remedy="raise it")
