"""GrammarCompiler: compiles a request's structured outputs to a grammar over one model's tokens.

Each request gets a Grammar or a RequestError within about four time-outs; for two of them it waits for other grammars.
This module owns the tokenizer, the cache and the time-out; grammar.py decides which tokens a grammar allows.

    compiled before        a copy, without waiting                      (cached)
    rejected lately        the same error, without waiting              (cached)
    choice, json_object    compiled at once: they are always quick      (compile)
    anything else          tried in a child process, then compiled      (compile); rejected if too many wait
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import OverloadedError, PagodaError, RequestError
from engine.options.structured_outputs import StructuredOutputsParams
from engine.structured_outputs.grammar import Grammar, Vocabulary, new_matcher, shorten
from engine.structured_outputs.probe import COMPILE_STACK, GrammarProbe, run_with_stack
from engine.structured_outputs.tokens import GrammarTokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["GrammarCompiler"]

_PARAM = "structured_outputs"
_CACHED_GRAMMARS = 64
_REMEMBERED_REFUSALS = 256
_REFUSED_FOR_S = 60.0  # then it is tried again: the machine may have been too busy, or short of memory
_MAX_COMPILING = 24  # the child compiles one at a time, most in a few milliseconds; slow ones let others time out
_HARMLESS_KINDS = ("choice", "json_object")  # always compile in little time and memory, so they need no child


@dataclass(frozen=True, slots=True)
class _Toolchain:
    tokenizer: LLTokenizer
    vocabulary: Vocabulary
    probe: GrammarProbe


class GrammarCompiler:
    """Compiles grammars for one model. Any thread may use it.

    The first use loads the tokenizer and starts the child process. That takes seconds, which the time-out does not
    count; call ``load`` at start to avoid the delay. ``compile`` blocks: event loops and the step loop must not call
    it.

    Args:
        model_path: directory with the tokenizer's files.
        vocab_size: size of the model's logits.
        eos_token_ids: the model's EOS ids. A model without any can serve no structured outputs, as no text could end.
        timeout_s: seconds that one compilation may take, with the first mask. The trial in the child process
            (probe.py) gets one half, the compilation in this process the other.
    """

    def __init__(
        self, model_path: str | Path, vocab_size: int, eos_token_ids: Sequence[int], *, timeout_s: float = 5.0
    ) -> None:
        self._model_path = model_path
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(set(eos_token_ids))
        self._timeout_s = timeout_s
        self._loaded: _Toolchain | None = None
        self._loading = threading.Lock()
        self._compiled: OrderedDict[StructuredOutputsParams, LLMatcher] = OrderedDict()  # in the initial state
        self._compiling: dict[StructuredOutputsParams, Future[LLMatcher]] = {}
        # The reason, and the time at which the refusal ends.
        self._refused: OrderedDict[StructuredOutputsParams, tuple[str, float]] = OrderedDict()
        self._lock = threading.Lock()  # guards the three above and the matchers in them

    def load(self) -> None:
        """Load the tokenizer and start the child process, unless that was done.

        Raises:
            RequestError: if llguidance is not installed, or does not work with this model.
        """
        self._toolchain().probe.start()

    def cached(self, params: StructuredOutputsParams) -> Grammar | None:
        """Return a grammar that was compiled before; None if it was not.

        It takes no longer than one step of the grammar, so event loops may call it.

        Raises:
            RequestError: if the same grammar was rejected within the last minute.
        """
        if self._loaded is None:
            return None
        with self._lock:
            self._raise_if_refused(params)
            matcher = self._compiled.get(params)
            if matcher is None:
                return None
            self._compiled.move_to_end(params)
            grammar = Grammar(matcher.deep_copy(), self._loaded.vocabulary)
        # Copies share the automaton's states: after one copy has reached their limit, the others fail too.
        return grammar if _has_first_mask(grammar) else None

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return a grammar in its initial state, independent of those returned before.

        When several threads need the same grammar at a time, one compiles it and the others wait.

        Raises:
            RequestError: if the grammar is invalid, matches no text, or takes too long or too much memory.
            OverloadedError: if too many other grammars are being compiled.
        """
        toolchain = self._toolchain()
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
            self._compile(toolchain, params, compiling)
        matcher = compiling.result()
        with self._lock:
            return Grammar(matcher.deep_copy(), toolchain.vocabulary)

    def _raise_if_refused(self, params: StructuredOutputsParams) -> None:
        reason, until = self._refused.get(params, ("", 0.0))
        if monotonic() < until:
            self._refused.move_to_end(params)
            raise _refusal(params, reason)

    def _compile(self, toolchain: _Toolchain, params: StructuredOutputsParams, outcome: Future[LLMatcher]) -> None:
        """Try and compile a grammar; ``outcome`` gets the matcher or the error."""
        try:
            reason = None if params.kind in _HARMLESS_KINDS else toolchain.probe.check(params)
            matcher = self._build(toolchain, params) if reason is None else reason
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
        """End the child process; garbage collection of the compiler ends it too."""
        with self._loading:
            if self._loaded is not None:
                self._loaded.probe.close()

    def _build(self, toolchain: _Toolchain, params: StructuredOutputsParams) -> LLMatcher | str:
        """Return the automaton, or the reason why it could not be built."""
        future: Future[LLMatcher] = Future()

        def work() -> None:
            try:
                matcher = new_matcher(toolchain.tokenizer, toolchain.vocabulary, params)
                # llguidance defers much of the work to the first mask.
                grammar = Grammar(matcher.deep_copy(), toolchain.vocabulary)
                if not _has_first_mask(grammar):
                    raise ValueError(grammar.error)
                future.set_result(matcher)
            except BaseException as error:  # llguidance's panics are not Exceptions
                future.set_exception(RuntimeError(shorten(error)))

        try:
            run_with_stack(COMPILE_STACK, work)
            return future.result(timeout=self._timeout_s / 2)
        except (RuntimeError, TimeoutError) as error:
            return str(error) or f"it takes longer than {self._timeout_s / 2:g} seconds"

    def _toolchain(self) -> _Toolchain:
        with self._loading:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def _load(self) -> _Toolchain:
        try:
            import llguidance  # noqa: F401
        except ImportError:
            raise RequestError(
                "need llguidance, which this server lacks",
                param=_PARAM,
                remedy="install it with: pip install 'llguidance>=1.9,<2'",
            ) from None
        if not self._eos_token_ids:
            raise RequestError("need a model with an EOS token, and this one has none", param=_PARAM)
        try:
            tokens = GrammarTokens.load(self._model_path, self._vocab_size, self._eos_token_ids)
            tokenizer = tokens.new_tokenizer()
        except (PagodaError, OSError, ValueError, KeyError) as error:
            reason = shorten(str(error).replace(str(self._model_path), "the model"))
            raise RequestError(f"do not work with this model's tokenizer: {reason}", param=_PARAM) from error
        probe = GrammarProbe(tokens, timeout_s=self._timeout_s / 2)
        weakref.finalize(self, probe.close)
        return _Toolchain(tokenizer, tokens.vocabulary(), probe)


def _has_first_mask(grammar: Grammar) -> bool:
    grammar.fill_mask(np.empty_like(grammar.vocabulary.eos_bits))
    return grammar.error is None


def _refusal(params: StructuredOutputsParams, reason: str) -> RequestError:
    return RequestError(f"cannot be compiled: {reason}", param=_PARAM, part=params.kind)
