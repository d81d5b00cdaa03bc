"""SamplingParams: how one request wants its tokens chosen and when it wants them to end.

Values are checked when the object is made, so that whoever holds one may trust it. It knows nothing of a model: ids
are compared with the vocabulary when the request is added to an engine, and words become ids where a tokenizer is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from engine.errors import RequestError, shown
from engine.structured_outputs.params import StructuredOutputsParams

__all__ = ["MAX_STOP_STRINGS", "SamplingParams"]

MAX_STOP_STRINGS = 4
MAX_STOP_TOKEN_IDS = 1024
MAX_SEQUENCES = 128  # n, best_of
MAX_BEAM_WIDTH = 64
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 64  # the sampler keeps so many last tokens of a sequence
MAX_LOGPROBS = 20
_ROUNDS_TO_ZERO = 2.0**-150  # the greatest number that is 0 as a float32

Rule = Callable[[str, Any], Any]  # (name, value) -> the value as it is kept; raises RequestError


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any, low: float, high: float) -> bool:
    """Whether ``value`` is a number in [low, high]; NaN is in no interval."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _number(low: float, high: float, interval: str) -> Rule:
    """A finite number in [low, high]; ``interval`` is how the message writes it."""

    def check(name: str, value: Any) -> Any:
        if not _is_number(value, low, high):
            raise RequestError("is out of range", param=name, value=value, remedy=f"give a finite number in {interval}")
        return value

    return check


def _integer(low: int, high: int | None = None) -> Rule:
    limit = f"at least {low}" if high is None else f"at least {low} and at most {high}"

    def check(name: str, value: Any) -> Any:
        if not _is_int(value) or value < low or (high is not None and value > high):
            raise RequestError("is out of range", param=name, value=value, remedy=f"give an integer of {limit}")
        return value

    return check


def _optional(rule: Rule) -> Rule:
    return lambda name, value: None if value is None else rule(name, value)


def _flag(name: str, value: Any) -> Any:
    if not isinstance(value, bool):
        raise RequestError("must be true or false", param=name, value=value)
    return value


def _flag_or_never(name: str, value: Any) -> Any:
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "never"):
        raise RequestError("must be true, false or 'never'", param=name, value=value)
    return value


def _listed(name: str, value: Any, limit: int | None, noun: str) -> tuple[Any, ...]:
    """Return a list of at most ``limit`` as a tuple."""
    if not isinstance(value, list | tuple):
        raise RequestError("must be a list", param=name, value=value)
    if limit is not None and len(value) > limit:
        raise RequestError(f"has {len(value)} {noun}", param=name, remedy=f"give at most {limit}")
    return tuple(value)


def _strings(limit: int) -> Rule:
    """Strings that are not empty, as a tuple; None is none."""

    def check(name: str, value: Any) -> Any:
        strings = _listed(name, () if value is None else value, limit, "strings")
        for string in strings:
            if not isinstance(string, str) or not string:
                raise RequestError(f"contains {shown(string)}", param=name, remedy="give strings that are not empty")
        return strings

    return check


def _stop(name: str, value: Any) -> Any:
    return _strings(MAX_STOP_STRINGS)(name, [value] if isinstance(value, str) else value)


def _token_ids(limit: int | None) -> Rule:
    """Token ids, as a tuple without duplicates."""

    def check(name: str, value: Any) -> Any:
        ids = _listed(name, value, limit, "ids")
        for token_id in ids:
            if not _is_int(token_id) or token_id < 0:
                raise RequestError(f"contains {shown(token_id)}", param=name, remedy="give ids of at least 0")
        return tuple(dict.fromkeys(ids))

    return check


def _stop_token_ids(name: str, value: Any) -> Any:
    return _token_ids(MAX_STOP_TOKEN_IDS)(name, () if value is None else value)


def _allowed_token_ids(name: str, value: Any) -> Any:
    ids = _token_ids(None)(name, value)
    if not ids:
        raise RequestError("allows no token", param=name, value=value, remedy="give at least one id, or leave it out")
    return ids


def _logit_bias(name: str, value: Any) -> Any:
    """A map of ids (or, as the OpenAI API sends them, decimal strings of ids) to biases."""
    if not isinstance(value, dict):
        raise RequestError("must be a map of token ids to biases", param=name, value=value)
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(f"has {len(value)} entries", param=name, remedy=f"give at most {MAX_LOGIT_BIAS}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        is_decimal = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 20
        token_id = int(key) if is_decimal else key
        if not _is_int(token_id) or token_id < 0:
            raise RequestError(f"has the key {shown(key)}", param=name, remedy="give token ids of at least 0")
        if token_id in biases:
            raise RequestError(f"has the id {shown(token_id)} twice", param=name, remedy="give it once")
        if not _is_number(bias, -100.0, 100.0):
            raise RequestError(f"has the bias {shown(bias)}", param=name, remedy="give finite numbers in [-100, 100]")
        biases[token_id] = float(bias)
    return biases


def _structured_outputs(name: str, value: Any) -> Any:
    if not isinstance(value, StructuredOutputsParams):
        raise RequestError("must be StructuredOutputsParams", param=name, value=value)
    return value


def _bad_words_token_ids(name: str, value: Any) -> Any:
    words = _listed(name, value, 2 * MAX_BAD_WORDS, "words")  # a word may be spelled with and without a space
    for word in words:
        if isinstance(word, list | tuple) and not 0 < len(word) <= MAX_BAD_WORD_TOKENS:
            raise RequestError(
                f"has a word of {len(word)} tokens",
                param=name,
                remedy=f"give words of 1 to {MAX_BAD_WORD_TOKENS} tokens",
            )
        for token_id in _listed(name, word, None, "ids"):
            if not _is_int(token_id) or token_id < 0:
                raise RequestError(f"contains {shown(token_id)}", param=name, remedy="give ids of at least 0")
    return tuple(dict.fromkeys(map(tuple, words)))


_RULES: dict[str, Rule] = {
    "n": _integer(1, MAX_SEQUENCES),
    "best_of": _optional(_integer(1, MAX_SEQUENCES)),
    "beam_width": _optional(_integer(1, MAX_BEAM_WIDTH)),
    "length_penalty": _number(-10.0, 10.0, "[-10, 10]"),  # a length to its power must be finite
    "early_stopping": _flag_or_never,
    "temperature": _number(0.0, 2.0, "[0, 2]"),
    "top_p": _number(math.nextafter(0.0, 1.0), 1.0, "(0, 1]"),
    "top_k": _integer(-1),
    "min_p": _number(0.0, 1.0, "[0, 1]"),
    "presence_penalty": _number(-2.0, 2.0, "[-2, 2]"),
    "frequency_penalty": _number(-2.0, 2.0, "[-2, 2]"),
    "repetition_penalty": _number(2.0**-10, 2.0**10, "[1/1024, 1024]"),  # a float32 logit stays finite
    "logit_bias": _optional(_logit_bias),
    "allowed_token_ids": _optional(_allowed_token_ids),
    "bad_words": _strings(MAX_BAD_WORDS),
    "bad_words_token_ids": _optional(_bad_words_token_ids),
    "seed": _optional(_integer(-(2**63), 2**63 - 1)),
    "max_tokens": _optional(_integer(1)),
    "min_tokens": _integer(0),
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "include_stop_str_in_output": _flag,
    "ignore_eos": _flag,
    "skip_special_tokens": _flag,
    "logprobs": _optional(_integer(0, MAX_LOGPROBS)),
    "prompt_logprobs": _optional(_integer(0, MAX_LOGPROBS)),
    "structured_outputs": _optional(_structured_outputs),
}

# Beams are ranked by the model's own probabilities: what would change, cut or report those is refused with them. Each
# with the values that ask for nothing.
_REFUSED_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
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
    "structured_outputs": (None,),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, named as in vLLM and in the OpenAI API.

    Attributes:
        n: sequences returned, at most 128.
        best_of: sequences generated, of which the n likeliest are returned; None is n.
        beam_width: search with so many beams, at most 64, instead of drawing; needs temperature 0. None is off.
        length_penalty: a beam's log-probability is divided by its length to this power, in [-10, 10].
        early_stopping: when a beam search ends, as in transformers: true, false or "never".
        temperature: in [0, 2]; 0 is greedy.
        top_p: nucleus mass in (0, 1].
        top_k: the k likeliest tokens; 0 or -1 is off.
        min_p: least probability relative to the likeliest token, in [0, 1].
        presence_penalty: subtracted from the logit of every token generated so far, in [-2, 2].
        frequency_penalty: subtracted once for every time a token was generated, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of the tokens of the prompt and the output.
        logit_bias: token id (or its decimal string) to what is added to its logit, in [-100, 100]; at most 1,024.
        allowed_token_ids: the only ids that may be generated.
        bad_words: at most 128 words that may not be generated.
        bad_words_token_ids: the bad words as token ids, filled in by whoever has a tokenizer.
        seed: int64; the same seed gives the same tokens whatever else is in the batch. None draws one.
        max_tokens: tokens generated at most; None is what is left of the context.
        min_tokens: nothing stops the sequence before so many: no stop token is generated, no stop string looked for.
        stop: at most 4 strings that end the text (checked where text is made, not in the engine).
        stop_token_ids: at most 1,024 ids that end the sequence besides the model's own EOS ids.
        include_stop_str_in_output: keep the stop string at the end of the text.
        ignore_eos: go on after the model's EOS ids.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: log-probabilities of the generated token and of so many likeliest ones, at most 20; None is off.
        prompt_logprobs: the same for the prompt's tokens.
        structured_outputs: a JSON schema, regex, choice or grammar that the text must follow.

    Raises:
        RequestError: for a value out of range; its ``param`` is the parameter's name.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    bad_words: list[str] | tuple[str, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            object.__setattr__(self, name, rule(name, getattr(self, name)))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"exceeds max_tokens={self.max_tokens}", param="min_tokens", value=self.min_tokens, remedy="lower it"
            )
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
        for name, neutral in _REFUSED_WITH_BEAMS.items():
            value = getattr(self, name)
            if value not in neutral:
                remedy = "set temperature to 0" if name == "temperature" else f"leave out {name} or beam_width"
                raise RequestError(
                    f"cannot be combined with beam_width={beam_width}", param=name, value=value, remedy=remedy
                )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, as a tuple whatever form they were given in."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without drawing: logits are divided by a float32 temperature."""
        return self.temperature <= _ROUNDS_TO_ZERO

    @cached_property
    def is_plain_greedy(self) -> bool:
        """Whether each token is simply the likeliest by the model's own logits, and nobody wants to see those."""
        return (
            self.is_greedy
            and self.num_sequences == 1
            and not (self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)
            and not (self.logit_bias or self.allowed_token_ids or self.bad_words or self.bad_words_token_ids)
            and not (self.uses_beam_search or self.needs_logprobs)
            and self.structured_outputs is None
        )

    @property
    def uses_beam_search(self) -> bool:
        """Whether beams are searched instead of tokens drawn."""
        return self.beam_width is not None

    @property
    def num_sequences(self) -> int:
        """Places in the batch that the request may need."""
        return self.beam_width or self.best_of or self.n

    @property
    def needs_logprobs(self) -> bool:
        """Whether generated tokens need log-probabilities: they are asked for, or they rank best_of sequences."""
        return self.logprobs is not None or (self.best_of is not None and self.best_of > self.n)

    def ids_by_parameter(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield each parameter that names token ids with those ids, for a check against a vocabulary."""
        named: dict[str, Iterable[int]] = {
            "stop_token_ids": self.stop_token_ids or (),
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words_token_ids": (token_id for word in self.bad_words_token_ids or () for token_id in word),
        }
        for name, token_ids in named.items():
            if ids := tuple(token_ids):
                yield name, ids
