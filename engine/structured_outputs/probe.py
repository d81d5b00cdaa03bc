"""GrammarProbe: tries a grammar in a child process before the engine's process compiles it.

A grammar of a few dozen characters can make its compiler overflow the stack, work for minutes, or allocate gigabytes.
A thread that does so cannot be stopped, and may crash the engine. Therefore a child process with limits on time and
memory compiles each new grammar first, and steps it along a random text. A grammar that kills the child is rejected.
Run as ``python -m engine.structured_outputs.probe``, this module is the child.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import OverloadedError
from engine.options.structured_outputs import StructuredOutputsParams
from engine.structured_outputs.grammar import Grammar, Vocabulary, new_matcher, shorten
from engine.structured_outputs.tokens import GrammarTokens

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["COMPILE_STACK", "GrammarProbe", "run_with_stack"]

COMPILE_STACK = 256 * 2**20  # bytes; only touched pages take memory. Rules can nest as deep as the grammar is long.
_STEP_STACK = 2**20  # bytes: as little as the threads that compute masks have
_MEMORY = 512 * 2**20  # bytes for compiling and stepping, with the stacks
_STEPS = 16  # tokens of the random text
_MAX_WAIT = 4  # in time-outs: how long a grammar waits for those before it

_stack_size = threading.Lock()


def run_with_stack(stack: int, work: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread that runs ``work`` with a stack of ``stack`` bytes."""
    thread = threading.Thread(target=work, name="grammar", daemon=True)
    with _stack_size:  # the setting is global to the process
        before = threading.stack_size(stack)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


class GrammarProbe:
    """One child process, started by ``start`` or on first use, and again after a grammar has killed it.

    Threads use it in turn.

    Args:
        tokens: of the model.
        timeout_s: seconds that one grammar may take.
    """

    def __init__(self, tokens: GrammarTokens, *, timeout_s: float) -> None:
        self._setup = (tokens, timeout_s)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def check(self, params: StructuredOutputsParams) -> str | None:
        """Return the reason to reject a grammar, or None; takes at most about six time-outs, four of them waiting.

        Raises:
            OverloadedError: if the grammar could not be tried.
        """
        if not self._lock.acquire(timeout=_MAX_WAIT * self._timeout_s):
            raise OverloadedError(
                "must wait: other grammars are being compiled", param="structured_outputs", remedy="try again later"
            )
        try:
            if self._child is not None:
                answered, reason = self._ask(self._child, params)
                if answered:
                    return reason
            # Earlier grammars may have used up the child's memory: a new child decides.
            self._child = None if self._is_closed else self._start()
            if self._child is None:
                raise OverloadedError(
                    "cannot be compiled: the process that tries grammars out did not start",
                    param="structured_outputs",
                    remedy="try again later",
                )
            return self._ask(self._child, params)[1]
        finally:
            self._lock.release()

    def start(self) -> None:
        """Start the child unless it runs, so that the first grammar need not wait for it."""
        with self._lock:
            if self._child is None and not self._is_closed:
                self._child = self._start()

    def _ask(self, child: subprocess.Popen[bytes], params: StructuredOutputsParams) -> tuple[bool, str | None]:
        """Return whether there is a verdict, and the reason for a rejection. Without a verdict the child has died."""
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the child has died and sends no reply
            pickle.dump(params, child.stdin)
            child.stdin.flush()
        reply = child.stdout.readline()  # the child's alarm limits the wait
        if reply:
            return True, json.loads(reply)
        child.wait()
        self._stop()
        if child.returncode == -signal.SIGALRM:
            return True, f"it takes longer than {self._timeout_s:g} seconds"
        return False, "it nests too deep or takes too much memory"

    def close(self) -> None:
        """Kill the child and start no other; a grammar that is being tried is rejected."""
        self._is_closed = True
        if (child := self._child) is not None:
            child.kill()
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes] | None:
        root = str(Path(__file__).resolve().parents[2])  # of the checkout, where the child finds this package
        path = os.pathsep.join(filter(None, (root, *sys.path)))  # same imports as here
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "engine.structured_outputs.probe"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "1"},  # arenas count as memory in use
                start_new_session=True,  # Ctrl-C in the engine's terminal must not interrupt the child
            )
        except OSError:
            return None
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(self._setup, child.stdin)
            child.stdin.flush()
        if child.stdout.readline():  # ready: no grammar's time-out includes the start
            return child
        _end(child)
        return None

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    with contextlib.suppress(BrokenPipeError):
        child.communicate()


# --- The child ------------------------------------------------------------------------------------------------------


def _serve() -> None:
    """Answer each pickled request on stdin with a line of JSON: the reason for a rejection, or null."""
    requests = sys.stdin.buffer
    tokens, timeout_s = pickle.load(requests)
    tokenizer = tokens.new_tokenizer()
    vocabulary = tokens.vocabulary()
    _limit_memory()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process wherever it is, in native code too
    print("ready", flush=True)
    with contextlib.suppress(EOFError):  # the engine's process has ended
        while True:
            params = pickle.load(requests)
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            reason = _try(tokenizer, vocabulary, params)
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(json.dumps(reason), flush=True)


def _limit_memory() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():  # only Linux has the file, and enforces the limit
        in_use = int(statm.read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = in_use + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _try(tokenizer: LLTokenizer, vocabulary: Vocabulary, params: StructuredOutputsParams) -> str | None:
    outcome: list[Any] = []

    def compile_it() -> None:
        try:
            outcome.append(Grammar(new_matcher(tokenizer, vocabulary, params), vocabulary))
        except BaseException as error:  # llguidance's panics are not Exceptions
            outcome.append(shorten(error))

    def step_it() -> None:
        grammar = outcome.pop()
        try:
            outcome.append(_walk(grammar))
        except BaseException as error:
            outcome.append(shorten(error))

    run_with_stack(COMPILE_STACK, compile_it).join()
    if isinstance(outcome[0], Grammar):
        run_with_stack(_STEP_STACK, step_it).join()
    reason: str | None = outcome[0]
    return reason


def _walk(grammar: Grammar) -> str | None:
    """Step a grammar along a random text; return the reason if it fails."""
    rng = random.Random(0)
    bits = np.empty_like(grammar.vocabulary.eos_bits)
    for _ in range(_STEPS):
        grammar.fill_mask(bits)
        if grammar.is_terminated:
            break
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
        if not grammar.accept(rng.choice([i for i in allowed if i not in grammar.vocabulary.eos_token_ids])):
            break
    return grammar.error


if __name__ == "__main__":
    _serve()
