"""GrammarCompiler: from what requests ask for to grammars over one model's tokens.

Whatever a request asks for ends, within a time, in a Grammar or in a RequestError. This module owns the tokenizer, the
cache and the time-out; which tokens a grammar allows is grammar.py's business.

A form that nobody has seen yet waits its turn with others; nobody else waits for it:

    compiled before        its copy, at once                            (cached)
    refused lately         the same refusal, at once                    (cached)
    choice, json_object    compiled, as they cannot take long           (compile)
    anything else          tried out in the child, then compiled, or refused where too many are ahead of it
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import OverloadedError, RequestError
from engine.structured_outputs.grammar import Grammar, Vocabulary, new_matcher, shorten
from engine.structured_outputs.params import StructuredOutputsParams
from engine.structured_outputs.probe import COMPILE_STACK, GrammarProbe, run_with_stack

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["GrammarCompiler"]

_PARAM = "structured_outputs"
_CACHED_GRAMMARS = 64
_REMEMBERED_REFUSALS = 256
_REFUSED_FOR_S = 60.0  # a time-out or a lack of memory may have been the machine's fault: they are tried again
_MAX_COMPILING = 8  # the child takes one after the other: who came behind more would only wait to be refused
_HARMLESS_KINDS = ("choice", "json_object")  # what is sure to compile in little time and space needs no child


class GrammarCompiler:
    """Compiles grammars for one model. Any thread may use it.

    The tokenizer is loaded at first use, which takes seconds and is not part of the time-out: call ``load`` at start
    where that matters. ``compile`` blocks: keep it off event loops and the step loop.

    Args:
        model_path: directory with the tokenizer's files.
        vocab_size: of the model's logits.
        eos_token_ids: the model's EOS ids, also for a sequence that ignores them; without any, every request is
            refused, as no text could end.
        timeout_s: seconds that one compilation may take, the first mask included. Half of them are for trying it out
            (probe.py), as it is done a second time if that goes well.
    """

    def __init__(
        self, model_path: str | Path, vocab_size: int, eos_token_ids: Sequence[int], *, timeout_s: float = 5.0
    ) -> None:
        self._model_path = model_path
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(set(eos_token_ids))
        self._timeout_s = timeout_s
        self._loaded: tuple[LLTokenizer, Vocabulary, GrammarProbe] | None = None
        self._loading = threading.Lock()
        self._compiled: OrderedDict[StructuredOutputsParams, LLMatcher] = OrderedDict()  # in the initial state
        self._compiling: dict[StructuredOutputsParams, Future[LLMatcher]] = {}
        self._refused: OrderedDict[StructuredOutputsParams, tuple[str, float]] = OrderedDict()  # why, and until when
        self._lock = threading.Lock()  # of the three above and of the matchers in them

    def load(self) -> None:
        """Load the tokenizer unless it is loaded.

        Raises:
            RequestError: if llguidance is not installed, or cannot work with this model.
        """
        self._resources()

    def cached(self, params: StructuredOutputsParams) -> Grammar | None:
        """Return a grammar if it has been compiled before, without waiting for anything; None if it has not.

        It takes no longer than one step of the grammar, so that an event loop may call it.

        Raises:
            RequestError: if it was refused within the last minute, with the same reason.
        """
        if self._loaded is None:
            return None
        vocabulary = self._loaded[1]
        with self._lock:
            self._raise_if_refused(params)
            matcher = self._compiled.get(params)
            if matcher is None:
                return None
            self._compiled.move_to_end(params)
            grammar = Grammar(matcher.deep_copy(), vocabulary)
        # Copies share their automaton's states: where one of them has used up the limit, no other goes on either.
        return grammar if _has_first_mask(grammar) else None

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return a grammar in its initial state, which steps independently of those returned before.

        Of several threads that want the same one at a time, as the answers to one prompt do, one compiles it.

        Raises:
            RequestError: if the form is invalid, matches nothing, or takes too long or too much memory.
            OverloadedError: if too many others are being compiled.
        """
        tokenizer, vocabulary, probe = self._resources()
        if (grammar := self.cached(params)) is not None:
            return grammar
        with self._lock:
            compiling = self._compiling.get(params)
            is_first = compiling is None
            if compiling is None:
                if len(self._compiling) >= _MAX_COMPILING and params.kind not in _HARMLESS_KINDS:
                    raise OverloadedError(
                        "must wait: other grammars are being compiled", param=_PARAM, remedy="try again later"
                    )
                compiling = self._compiling[params] = Future()
        if is_first:
            self._compile(tokenizer, vocabulary, probe, params, compiling)
        matcher = compiling.result()
        with self._lock:
            return Grammar(matcher.deep_copy(), vocabulary)

    def _raise_if_refused(self, params: StructuredOutputsParams) -> None:
        reason, until = self._refused.get(params, ("", 0.0))
        if monotonic() < until:
            self._refused.move_to_end(params)
            raise _refusal(params, reason)

    def _compile(
        self,
        tokenizer: LLTokenizer,
        vocabulary: Vocabulary,
        probe: GrammarProbe,
        params: StructuredOutputsParams,
        outcome: Future[LLMatcher],
    ) -> None:
        """Try a grammar out and make it; whoever waits for it hears how that went."""
        try:
            reason = None if params.kind in _HARMLESS_KINDS else probe.check(params)
            matcher = self._build(tokenizer, vocabulary, params) if reason is None else reason
        except BaseException as error:
            with self._lock:
                del self._compiling[params]
            outcome.set_exception(error)
            return
        if isinstance(matcher, str):
            self._refuse(params, matcher)
            outcome.set_exception(_refusal(params, matcher))
            return
        with self._lock:
            del self._compiling[params]
            self._compiled[params] = matcher
            self._compiled.move_to_end(params)
            if len(self._compiled) > _CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        outcome.set_result(matcher)

    def _refuse(self, params: StructuredOutputsParams, reason: str) -> None:
        with self._lock:
            del self._compiling[params]
            self._refused[params] = (reason, monotonic() + _REFUSED_FOR_S)
            self._refused.move_to_end(params)
            if len(self._refused) > _REMEMBERED_REFUSALS:
                self._refused.popitem(last=False)

    def close(self) -> None:
        """Release the process that tries grammars out; it also goes with the compiler."""
        with self._loading:
            if self._loaded is not None:
                self._loaded[2].close()

    def _build(
        self, tokenizer: LLTokenizer, vocabulary: Vocabulary, params: StructuredOutputsParams
    ) -> LLMatcher | str:
        """Return the automaton, or why there is none."""
        future: Future[LLMatcher] = Future()

        def work() -> None:
            try:
                matcher = new_matcher(tokenizer, params)
                # Much of the work is put off until the first mask.
                grammar = Grammar(matcher.deep_copy(), vocabulary)
                if not _has_first_mask(grammar):
                    raise ValueError(grammar.error)
                future.set_result(matcher)
            except BaseException as error:  # a panic of llguidance is no Exception
                future.set_exception(RuntimeError(shorten(error)))

        try:
            run_with_stack(COMPILE_STACK, work)
            return future.result(timeout=self._timeout_s / 2)
        except (RuntimeError, TimeoutError) as error:
            return str(error) or f"it takes longer than {self._timeout_s / 2:g} seconds"

    def _resources(self) -> tuple[LLTokenizer, Vocabulary, GrammarProbe]:
        with self._loading:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def _load(self) -> tuple[LLTokenizer, Vocabulary, GrammarProbe]:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise RequestError(
                "need llguidance, which this server lacks",
                param=_PARAM,
                remedy="install it with: pip install 'llguidance>=1.9,<2'",
            ) from None
        if not self._eos_token_ids:
            raise RequestError("need a model with an EOS token, and this one has none", param=_PARAM)
        try:
            tokenizer_json = self._tokenizer_json()
            tokenizer = LLTokenizer(tokenizer_json, self._vocab_size, self._eos_token_ids)
        except (OSError, ValueError, KeyError, AttributeError) as error:  # AttributeError: it has no fast backend
            reason = shorten(str(error).replace(str(self._model_path), "the model"))
            raise RequestError(f"do not work with this model's tokenizer: {reason}", param=_PARAM) from error
        probe = GrammarProbe(tokenizer_json, self._vocab_size, self._eos_token_ids, timeout_s=self._timeout_s / 2)
        weakref.finalize(self, probe.close)
        return tokenizer, Vocabulary.build(self._vocab_size, frozenset(self._eos_token_ids)), probe

    def _tokenizer_json(self) -> str:
        """Return the tokenizer, with the tokens that only tokenizer_config.json adds, as tokenizer.json writes it."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(self._model_path), trust_remote_code=False, local_files_only=True)
        backend = tokenizer.backend_tokenizer
        backend.no_padding()
        backend.no_truncation()
        return str(backend.to_str())


def _has_first_mask(grammar: Grammar) -> bool:
    grammar.fill(np.empty_like(grammar.vocabulary.eos_bits))
    return grammar.error is None


def _refusal(params: StructuredOutputsParams, reason: str) -> RequestError:
    return RequestError(f"cannot be compiled: {reason}", param=_PARAM, part=params.kind)
