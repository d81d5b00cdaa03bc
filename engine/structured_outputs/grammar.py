"""Grammar: the tokens that may come next in one sequence, so that its text has the requested form.

The automata are llguidance's (https://github.com/guidance-ai/llguidance), which is imported on first use. This module
turns a request into an automaton with limits and steps it; an error stays with its sequence. It does not know logits,
torch or the scheduler. compiler.py makes automata safely and in time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.options.structured_outputs import StructuredOutputsParams
from engine.structured_outputs.schemas import without_unknown_formats, without_unknown_formats_in_grammar
from kernels.cgroup import available_cpus

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

__all__ = ["Grammar", "Vocabulary", "fill_masks", "new_matcher", "shorten"]

_MAX_LEXER_STATES = 100_000  # up to 2 kB each, shared by all copies of a matcher
# Items of the parser in one step. An ambiguous grammar of a few dozen characters reaches any limit in every step, and
# the whole batch waits: llguidance's default of 50,000 takes 0.6 s. A schema of hundreds of properties needs fewer.
_MAX_STEP_ITEMS = 10_000
_MAX_REASON = 240  # characters of llguidance's reason in an error
# JSON allows any whitespace between tokens; with more than this, a small model may generate nothing else.
_WHITESPACE = r"\x20|\x0A\x20{0,16}"


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model, shared by all its grammars.

    Attributes:
        size: of the model's logits; the tokenizer may have fewer tokens.
        eos_token_ids: the tokens that end a text.
        eos_bits: int32 [ceil(size / 32)], the bits of ``eos_token_ids``.
        has_all_bytes: whether tokens can write any text. Otherwise llguidance must not choose the tokens of a text that
            has to come next: there may be none.
    """

    size: int
    eos_token_ids: frozenset[int]
    eos_bits: npt.NDArray[np.int32]
    has_all_bytes: bool = True

    @classmethod
    def build(cls, size: int, eos_token_ids: frozenset[int], *, has_all_bytes: bool = True) -> Vocabulary:
        """Compute the bits."""
        bits = np.zeros(-(-size // 32), dtype=np.uint32)
        for token_id in eos_token_ids:
            bits[token_id // 32] |= np.uint32(1 << token_id % 32)
        return cls(size, eos_token_ids, bits.view(np.int32), has_all_bytes)


class Grammar:
    """The state of one sequence's grammar.

    EOS (any of the model's EOS ids) is allowed exactly where the grammar accepts the text so far. A token that is not
    allowed, or a limit of the automaton, sets ``error``. From then on only EOS is allowed, so that the batch continues
    and the engine can end this sequence with an error.

    A sequence must end when ``is_terminated`` becomes true, whatever its ``ignore_eos`` and ``min_tokens`` are: no
    other token can follow. EOS ends the grammar even for a sequence that ignores EOS.

    One thread at a time may use a grammar; while another thread computes its mask, call nothing.
    """

    __slots__ = ("_ended", "_matcher", "error", "vocabulary")

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._ended = False  # EOS was accepted, or the last mask allowed only EOS
        self.vocabulary = vocabulary
        self.error: str | None = None

    def accept(self, token_id: int) -> bool:
        """Advance by a sampled token; False, with ``error`` set, if it was not allowed."""
        if self.error is not None:
            return False
        if token_id in self.vocabulary.eos_token_ids:
            allowed = self._ended = self._ended or self._matcher.is_accepting()
        else:
            in_range = 0 <= token_id < self.vocabulary.size
            allowed = not self._ended and in_range and self._matcher.consume_token(token_id)
        if not allowed:
            self.error = _reason(self._matcher) or f"token {token_id} is not allowed here"
        return allowed

    @property
    def is_terminated(self) -> bool:
        """Whether only EOS may follow: the text is complete, or the grammar failed."""
        return self._ended or self.error is not None or self._matcher.is_stopped()

    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        """Set the bit of each allowed token in ``mask``, int32 [ceil(vocab_size / 32)]."""
        fill_masks([self], mask[None, :])

    def fork(self) -> Grammar:
        """Return an independent copy in the same state."""
        copy = Grammar(self._matcher.deep_copy(), self.vocabulary)
        copy._ended, copy.error = self._ended, self.error
        return copy


def fill_masks(grammars: Sequence[Grammar], masks: npt.NDArray[np.int32]) -> None:
    """Set the bit of each token that each grammar allows next.

    llguidance releases the interpreter's lock while it works.

    Args:
        grammars: of one model.
        masks: int32 [len(grammars), ceil(vocab_size / 32)]; bit ``i % 32`` of word ``i // 32`` stands for token ``i``.
    """
    assert masks.dtype == np.int32
    assert masks.flags.c_contiguous
    if not grammars:
        return
    eos_bits = grammars[0].vocabulary.eos_bits
    assert masks.shape == (len(grammars), len(eos_bits))
    matchers = [grammar._matcher for grammar in grammars]
    _compute_masks(matchers, masks)
    # The text that the grammar allows may contain the spelling of an EOS token; the token itself only ends the text.
    may_end = np.fromiter((matcher.is_accepting() for matcher in matchers), dtype=bool, count=len(matchers))
    masks[~may_end] &= ~eos_bits
    has_token = np.any(masks & ~eos_bits, axis=1).tolist()
    for index, grammar in enumerate(grammars):
        if grammar.error is None and not has_token[index]:
            grammar._ended = bool(may_end[index])
            if not may_end[index]:
                grammar.error = _reason(matchers[index]) or "no token continues the text as the grammar asks"
        if grammar.error is not None or grammar._ended:
            masks[index] = eos_bits


def _compute_masks(matchers: list[LLMatcher], masks: npt.NDArray[np.int32]) -> None:
    mask_bytes = masks.shape[1] * masks.itemsize
    if len(matchers) == 1:
        matchers[0].unsafe_compute_mask_ptr(masks.ctypes.data, mask_bytes)
    else:
        numbered = [(matcher, index) for index, matcher in enumerate(matchers)]
        _executor().unsafe_compute_mask_ptr(numbered, masks.ctypes.data, mask_bytes, len(masks))


@cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(max(1, min(8, available_cpus() // 2)))


def _reason(matcher: LLMatcher) -> str:
    """Return the reason why ``matcher`` failed; empty if it did not."""
    reason = shorten(matcher.get_error().partition("<non-verbose/>")[0])
    return "no text matches it" if reason.startswith("NoExtension") else reason


def shorten(reason: object) -> str:
    """Return ``reason`` in one line of bounded length."""
    line = " ".join(str(reason).split())
    return line if len(line) <= _MAX_REASON else f"{line[:_MAX_REASON]}..."


def new_matcher(tokenizer: LLTokenizer, vocabulary: Vocabulary, params: StructuredOutputsParams) -> LLMatcher:
    """Return llguidance's automaton for a request, in its initial state.

    Raises:
        ValueError: if llguidance rejects the grammar; the message gives the reason in one line.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, step_max_items=_MAX_STEP_ITEMS, verbose_errors=False)
    source = _source(params) if vocabulary.has_all_bytes else _without_forcing(_source(params))
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(_reason(matcher))
    return matcher


def _source(params: StructuredOutputsParams) -> str:
    """Return the request's grammar in llguidance's notation."""
    from llguidance import LLMatcher, grammar_from

    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.grammar is not None:
        return grammar_from("grammar", without_unknown_formats_in_grammar(params.grammar))
    if params.choice is not None:
        # One terminal: a rule may have at most 2,000 alternatives.
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(_lark_string, params.choice)))
    schema = {"type": "object"} if params.json is None else without_unknown_formats(json.loads(str(params.json)))
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema, ensure_ascii=False),
        overrides={"whitespace_pattern": _WHITESPACE, "item_separator": ",", "key_separator": ":"},
    )


def _without_forcing(source: str) -> str:
    """Return a grammar whose tokens are never chosen by llguidance."""
    grammars = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    top = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @form'}
    return json.dumps({"grammars": [top, grammars[0] | {"name": "form"}, *grammars[1:]]})


def _lark_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
