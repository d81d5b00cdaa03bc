"""ScriptedEngine: in place of AsyncEngine, answers requests from a script when the test steps it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.outputs import EngineOutput, FinishReason, OutputReader, RequestTiming, TokenLogprobs
from engine.request import EngineRequest

RESUMED_CACHED_TOKENS = 1000  # cached at a replica that continues an answer; the client must not see them


@dataclass(frozen=True)
class Answer:
    """What every engine answers to one request.

    Attributes:
        ends_empty: the answer ends in a step that brings no token.
    """

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    num_cached_tokens: int
    ends_empty: bool
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None

    def outputs(self, request: EngineRequest, counts: Iterator[int]) -> Iterator[EngineOutput]:
        """Yield the outputs of the steps of one engine, with up to so many tokens each."""
        first = position = len(request.output_token_ids)
        while True:
            end = min(position + next(counts), len(self.token_ids))
            is_last = end == len(self.token_ids) and not (self.ends_empty and end > position)
            yield self._output(request, position, end, is_first=position == first, is_last=is_last)
            if is_last:
                return
            position = end

    def _output(self, request: EngineRequest, start: int, end: int, *, is_first: bool, is_last: bool) -> EngineOutput:
        resumed = bool(request.output_token_ids)
        has_prompt_logprobs = is_first and request.params.prompt_logprobs is not None
        return EngineOutput(
            request.request_id,
            0,
            self.token_ids[start:end],
            self.finish_reason if is_last else None,
            self.stop_reason if is_last else None,
            RESUMED_CACHED_TOKENS if resumed else self.num_cached_tokens,
            is_last,
            None if self.logprobs is None or start == end else self.logprobs[start:end],
            self.prompt_logprobs if has_prompt_logprobs else None,
            None if self.logprobs is None else -float(end),
            self._timing(is_last) if is_first or is_last else None,
        )

    def _timing(self, is_last: bool) -> RequestTiming:
        return RequestTiming(1.0, 2.0, 3.0 if is_last else 0.0)


@dataclass
class _Running:
    request: EngineRequest
    reader: OutputReader
    tag: Any
    outputs: Iterator[EngineOutput]


class ScriptedEngine:
    """The part of AsyncEngine that a ChannelServer uses. Its step thread is the caller of ``step``.

    Args:
        answer: to a request.
    """

    def __init__(self, answer: Callable[[EngineRequest], Answer]) -> None:
        self._answer = answer
        self._commands: deque[Callable[[], None]] = deque()
        self._count = 1
        self.running: dict[str, _Running] = {}

    def step(self, count: int) -> None:
        """Run the commands, and bring up to ``count`` tokens for each request; with 0, run the commands only."""
        while self._commands:
            self._commands.popleft()()
        if not count:
            return
        self._count = count
        by_reader: dict[OutputReader, list[tuple[Any, EngineOutput]]] = {}
        for key, stream in list(self.running.items()):
            output = next(stream.outputs)
            by_reader.setdefault(stream.reader, []).append((stream.tag, output))
            if output.is_last:
                del self.running[key]
        for reader, outputs in by_reader.items():
            plain = [(tag, output.token_ids[0]) for tag, output in outputs if _is_plain(output)]
            others = [(tag, output) for tag, output in outputs if not _is_plain(output)]
            reader.publish([tag for tag, _ in plain], [token_id for _, token_id in plain], others)

    # --- what a ChannelServer calls ---------------------------------------------------------------------------------

    def check_health(self) -> None:
        """Always healthy."""

    def check_request(self, request: EngineRequest) -> None:
        """Every request is valid."""

    def call_in_step_thread(self, callback: Callable[[], None]) -> None:
        self._commands.append(callback)

    def submit(self, request: EngineRequest, reader: OutputReader, tag: Any, grammar: object = None) -> None:
        def queue() -> None:
            outputs = self._answer(request).outputs(request, iter(lambda: self._count, -1))
            self.running[request.request_id] = _Running(request, reader, tag, outputs)

        self._commands.append(queue)

    def abort(self, request_id: str) -> None:
        self._commands.append(lambda: self._abort(request_id))

    def remove_reader(self, reader: OutputReader) -> None:
        def abort_all() -> None:
            for key in [key for key, stream in self.running.items() if stream.reader is reader]:
                self._abort(key)

        self._commands.append(abort_all)

    def _abort(self, key: str) -> None:
        if (stream := self.running.pop(key, None)) is not None:
            stream.reader.end(stream.tag)


def _is_plain(output: EngineOutput) -> bool:
    """Whether an output is one token and nothing else."""
    return output == EngineOutput(
        output.request_id, 0, output.token_ids[:1], num_cached_tokens=output.num_cached_tokens
    ) and bool(output.token_ids)
