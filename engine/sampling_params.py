"""SamplingParams: how the tokens of one request are sampled, and when the request stops.

The constructor checks the values, so every SamplingParams is valid. It does not depend on a model: RequestValidator
compares ids with the vocabulary, and the caller that has a tokenizer turns bad words into ids.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from msgspec import Struct
from msgspec.structs import force_setattr

from engine.errors import RequestError, listed, shown
from engine.options.rules import (
    RuleError,
    apply_rules,
    flag,
    instance,
    integer,
    is_integer,
    is_number,
    items,
    number,
    optional,
    rules_of,
    strings,
)
from engine.options.structured_outputs import StructuredOutputsParams
from engine.options.thinking_budget import ThinkingBudget

__all__ = ["MAX_STOP_STRINGS", "REJECTED_WITH_BEAMS", "SamplingParams"]

MAX_STOP_STRINGS = 4
MAX_STOP_TOKEN_IDS = 1024
MAX_SEQUENCES = 128  # n, best_of
MAX_BEAM_WIDTH = 64
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 64  # the sampler keeps this many last tokens of a sequence
MAX_LOGPROB_TOKEN_IDS = 128
_ROUNDS_TO_ZERO = 2.0**-150  # the greatest number that is 0 as a float32


def _flag_or_never(value: Any) -> Any:
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "never"):
        raise RuleError("must be true, false or 'never'", value=value)
    return value


def _stop(value: Any) -> Any:
    return strings(MAX_STOP_STRINGS)([value] if isinstance(value, str) else value)


def _token_ids(value: Any, limit: int | None) -> tuple[int, ...]:
    """Return token ids as a tuple without duplicates."""
    return tuple(dict.fromkeys(_checked_ids(items(value, limit, "ids"))))


def _checked_ids(ids: tuple[Any, ...]) -> tuple[int, ...]:
    if set(map(type, ids)) <= {int} and min(ids, default=0) >= 0:  # in C: there may be a million
        return ids
    for token_id in ids:
        if not is_integer(token_id) or token_id < 0:
            raise RuleError(f"contains {shown(token_id)}", remedy="give ids of at least 0")
    return ids


def _stop_token_ids(value: Any) -> Any:
    return _token_ids(() if value is None else value, MAX_STOP_TOKEN_IDS)


def _allowed_token_ids(value: Any) -> Any:
    ids = _token_ids(value, None)
    if not ids:
        raise RuleError("allows no token", value=value, remedy="give at least one id, or leave it out")
    return ids


def _logit_bias(value: Any) -> Any:
    """Return a map of ids (or, as the OpenAI API sends them, decimal strings of ids) to biases."""
    if not isinstance(value, dict):
        raise RuleError("must be a map of token ids to biases", value=value)
    if len(value) > MAX_LOGIT_BIAS:
        raise RuleError(f"has {len(value)} entries", remedy=f"give at most {MAX_LOGIT_BIAS}")
    ids = [(_as_token_id(key), key, bias) for key, bias in value.items()]
    if wrong := [key for token_id, key, _ in ids if token_id is None]:
        raise RuleError(f"has the key {listed(wrong)}", remedy="give token ids of at least 0")
    biases = {token_id: bias for token_id, _, bias in ids if token_id is not None}
    if len(biases) < len(ids):
        counts = Counter(token_id for token_id, _, _ in ids)
        repeated = [token_id for token_id, count in counts.items() if count > 1]
        raise RuleError(f"has the id {listed(repeated)} twice", remedy="give it once")
    if wrong := [token_id for token_id, bias in biases.items() if not is_number(bias, -100.0, 100.0)]:
        problem = f"has the bias {listed([biases[token_id] for token_id in wrong])} for {listed(wrong)}"
        raise RuleError(problem, remedy="give finite numbers in [-100, 100]")
    return {token_id: float(bias) for token_id, bias in biases.items()}


def _as_token_id(key: object) -> int | None:
    """Return an id, or the id that a decimal string is; None if ``key`` is neither."""
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 20:
        return int(key)
    return key if isinstance(key, int) and not isinstance(key, bool) and key >= 0 else None


def _logprob_token_ids(value: Any) -> Any:
    ids = _token_ids(value, MAX_LOGPROB_TOKEN_IDS)
    if not ids:
        raise RuleError("names no token", value=value, remedy="give at least one id, or leave it out")
    return ids


def _bad_words_token_ids(value: Any) -> Any:
    words = items(value, 2 * MAX_BAD_WORDS, "words")  # a word may have a spelling with and without a space
    for word in words:
        if isinstance(word, list | tuple) and not 0 < len(word) <= MAX_BAD_WORD_TOKENS:
            remedy = f"give words of 1 to {MAX_BAD_WORD_TOKENS} tokens"
            raise RuleError(f"has a word of {len(word)} tokens", remedy=remedy)
        _checked_ids(items(word, None, "ids"))
    return tuple(dict.fromkeys(map(tuple, words)))


# Beams are sorted by the model's own probabilities, so parameters that change, cut or report those are rejected unless
# they have one of these neutral values.
REJECTED_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "best_of": (None,),
    "temperature": (0.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": ((),),
    "bad_words_token_ids": (None, ()),
    "stop": ((),),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "logprob_token_ids": (None,),
    "structured_outputs": (None,),
    "thinking_budget": (None,),
}


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, dict=True):
    """Sampling parameters of one request, named as in vLLM and in the OpenAI API. The annotation of each has its rule.

    Attributes:
        n: sequences returned, at most 128.
        best_of: sequences generated; the n most likely are returned; None is n.
        beam_width: number of beams of a beam search, at most 64; needs temperature 0. None samples.
        length_penalty: a beam's log-probability is divided by its length to this power, in [-10, 10].
        early_stopping: when a beam search ends, as in transformers: true, false or "never".
        temperature: in [0, 2]; 0 is greedy.
        top_p: nucleus mass in (0, 1].
        top_k: sample from the k most likely tokens; 0 or -1 is off.
        min_p: minimum probability relative to the most likely token, in [0, 1].
        presence_penalty: subtracted from the logit of each token that has been generated, in [-2, 2].
        frequency_penalty: subtracted from a token's logit once for each time it was generated, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of the tokens of the prompt and the output.
        logit_bias: token id (or its decimal string) to the bias of its logit, in [-100, 100]; at most 1,024 ids.
        allowed_token_ids: the only ids that may be generated.
        bad_words: at most 128 words that may not be generated.
        bad_words_token_ids: the bad words as token ids; LLM and the ingress fill them in.
        seed: int64; the same seed gives the same tokens in any batch. None draws a seed.
        max_tokens: maximum generated tokens; None is the rest of the context.
        min_tokens: minimum generated tokens: before them no stop token is sampled and no stop string searched.
        stop: at most 4 strings that end the text; the detokenizer checks them, not the engine.
        stop_token_ids: at most 1,024 ids that end the sequence, in addition to the model's EOS ids.
        include_stop_str_in_output: keep the stop string at the end of the text.
        ignore_eos: continue after the model's EOS ids.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: log-probabilities of the generated token and of this many most likely tokens, at most the engine's
            ``max_logprobs``; -1 for all tokens, None is off.
        prompt_logprobs: the same for the prompt's tokens.
        logprob_token_ids: at most 128 tokens whose log-probabilities are returned in addition; needs ``logprobs``.
        structured_outputs: a JSON schema, regex, choice or grammar that the text must follow.
        thinking_budget: maximum tokens of reasoning, after which it is ended.

    Raises:
        RequestError: for a value out of range; its ``param`` names the parameter.
    """

    n: Annotated[int, integer(1, MAX_SEQUENCES)] = 1
    best_of: Annotated[int | None, optional(integer(1, MAX_SEQUENCES))] = None
    beam_width: Annotated[int | None, optional(integer(1, MAX_BEAM_WIDTH))] = None
    length_penalty: Annotated[float, number(-10, 10)] = 1.0  # a length to its power must be finite
    early_stopping: Annotated[bool | Literal["never"], _flag_or_never] = False
    temperature: Annotated[float, number(0, 2)] = 1.0
    top_p: Annotated[float, number(math.nextafter(0, 1), 1, "in (0, 1]")] = 1.0
    top_k: Annotated[int, integer(-1)] = 0
    min_p: Annotated[float, number(0, 1)] = 0.0
    presence_penalty: Annotated[float, number(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, number(-2, 2)] = 0.0
    # A float32 logit stays finite.
    repetition_penalty: Annotated[float, number(2.0**-10, 2.0**10, "in [1/1024, 1024]")] = 1.0
    logit_bias: Annotated[dict[int, float] | None, optional(_logit_bias)] = None
    allowed_token_ids: Annotated[Sequence[int] | None, optional(_allowed_token_ids)] = None
    bad_words: Annotated[Sequence[str] | None, strings(MAX_BAD_WORDS)] = ()
    bad_words_token_ids: Annotated[Sequence[Sequence[int]] | None, optional(_bad_words_token_ids)] = None
    seed: Annotated[int | None, optional(integer(-(2**63), 2**63 - 1))] = None
    max_tokens: Annotated[int | None, optional(integer(1))] = 16
    min_tokens: Annotated[int, integer(0)] = 0
    stop: Annotated[str | Sequence[str] | None, _stop] = ()
    stop_token_ids: Annotated[Sequence[int] | None, _stop_token_ids] = ()
    include_stop_str_in_output: Annotated[bool, flag] = False
    ignore_eos: Annotated[bool, flag] = False
    skip_special_tokens: Annotated[bool, flag] = True
    logprobs: Annotated[int | None, optional(integer(-1))] = None
    prompt_logprobs: Annotated[int | None, optional(integer(-1))] = None
    logprob_token_ids: Annotated[Sequence[int] | None, optional(_logprob_token_ids)] = None
    structured_outputs: Annotated[
        StructuredOutputsParams | None, optional(instance(StructuredOutputsParams, "must be StructuredOutputsParams"))
    ] = None
    thinking_budget: Annotated[
        ThinkingBudget | None, optional(instance(ThinkingBudget, "must be a ThinkingBudget"))
    ] = None

    def __post_init__(self) -> None:
        # Most parameters of a request have their default, which needs no check.
        given = {name: rule for name, rule in _RULES.items() if getattr(self, name) is not _DEFAULTS[name]}
        apply_rules(self, given, RequestError, store=force_setattr)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"exceeds max_tokens={self.max_tokens}", param="min_tokens", value=self.min_tokens, remedy="lower it"
            )
        if self.logprob_token_ids is not None and self.logprobs is None:
            raise RequestError("needs logprobs", param="logprob_token_ids", remedy="set both")
        if self.thinking_budget is not None and self.structured_outputs is not None:
            remedy = "leave one of them out"
            raise RequestError("cannot be combined with structured_outputs", param="thinking_budget", remedy=remedy)
        if self.beam_width is None:
            self._check_number_of_draws()
        else:
            self._check_beams(self.beam_width)

    def _check_number_of_draws(self) -> None:
        if self.best_of is not None and self.n > self.best_of:
            raise RequestError(
                f"is less than n={self.n}", param="best_of", value=self.best_of, remedy="raise it or lower n"
            )
        if self.is_greedy and self.num_sequences > 1:
            name = "n" if self.best_of is None else "best_of"
            raise RequestError(
                "at temperature 0 gives equal answers", param=name, value=self.num_sequences, remedy="raise temperature"
            )

    def _check_beams(self, beam_width: int) -> None:
        if self.n > beam_width:
            raise RequestError(
                f"exceeds beam_width={beam_width}", param="n", value=self.n, remedy="lower n or raise beam_width"
            )
        for name, neutral in REJECTED_WITH_BEAMS.items():
            value = getattr(self, name)
            if value not in neutral:
                remedy = "set temperature to 0" if name == "temperature" else f"leave out {name} or beam_width"
                raise RequestError(
                    f"cannot be combined with beam_width={beam_width}", param=name, value=value, remedy=remedy
                )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, as a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is chosen without sampling. The temperature counts as float32."""
        return self.temperature <= _ROUNDS_TO_ZERO

    @cached_property
    def is_plain_greedy(self) -> bool:
        """Whether each token is the argmax of the model's own logits, and no log-probabilities are needed."""
        return (
            self.is_greedy
            and self.num_sequences == 1
            and not (self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)
            and not (self.logit_bias or self.allowed_token_ids or self.bad_words or self.bad_words_token_ids)
            and not (self.uses_beam_search or self.needs_logprobs)
            and self.structured_outputs is None
            and self.thinking_budget is None
        )

    @cached_property
    def needs_history(self) -> bool:
        """Whether the choice of a token depends on the tokens before it beyond the logits, as with penalties."""
        penalizes = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        has_long_words = any(len(word) > 1 for word in self.bad_words_token_ids or ())
        return bool(penalizes or has_long_words or self.uses_beam_search or self.thinking_budget is not None)

    @property
    def uses_beam_search(self) -> bool:
        """Whether the request is a beam search."""
        return self.beam_width is not None

    @property
    def num_sequences(self) -> int:
        """Slots of the batch that the request may need."""
        return self.beam_width or self.best_of or self.n

    @property
    def needs_logprobs(self) -> bool:
        """Whether generated tokens need log-probabilities: for the output, or to choose the best of best_of."""
        return self.logprobs is not None or (self.best_of is not None and self.best_of > self.n)

    def ids_by_parameter(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield each parameter that has token ids with its ids, for a check against the vocabulary."""
        named: dict[str, Iterable[int]] = {
            "stop_token_ids": self.stop_token_ids or (),
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "logprob_token_ids": self.logprob_token_ids or (),
            "bad_words_token_ids": (token_id for word in self.bad_words_token_ids or () for token_id in word),
            "thinking_budget": () if self.thinking_budget is None else self.thinking_budget.token_ids,
        }
        for name, token_ids in named.items():
            if ids := tuple(token_ids):
                yield name, ids


_RULES = rules_of(SamplingParams)
_DEFAULTS = dict(zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True))
