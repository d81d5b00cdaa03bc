"""Output: the items of one response, made from its answer piece by piece, and the events of their stream.

A whole response is made in the same way, so that it says the same as a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from deployments.api.openai.answer_formats import AnswerFormat
from deployments.api.responses.output_items import CallItem, MessageItem, OutputItem, ReasoningItem, StreamEvent
from deployments.parsers.call_ids import RANDOM_IDS
from deployments.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from deployments.parsers.reasoning_tokens import ReasoningTokens
from engine.outputs import TokenLogprobs

__all__ = ["Output"]

Token: TypeAlias = tuple[int, TokenLogprobs | None]
Logprobs: TypeAlias = Callable[[Sequence[Token]], list[dict[str, Any]]]
_ITEMS: dict[type[Event], type[OutputItem]] = {
    Content: MessageItem,
    Reasoning: ReasoningItem,
    CallStart: CallItem,
    CallArguments: CallItem,
}


class Output:
    """Collects the items of one answer.

    A token belongs to the item to whose text it adds. Tokens whose text makes no event, such as a marker after
    reasoning, belong to the item before them, or to the next one if that item is a message.

    Args:
        answer_format: the format of the answer; None if its text is its content.
        logprobs: writes the log-probabilities of tokens; None if they are not wanted.
    """

    def __init__(self, answer_format: AnswerFormat | None, logprobs: Logprobs | None) -> None:
        self._parser = None if answer_format is None else answer_format.new_parser()
        ids = RANDOM_IDS if answer_format is None else answer_format.call_ids
        self._new_call_id = ids.counter("call_")
        self._logprobs = logprobs
        self._finished: list[dict[str, Any]] = []
        self._open: OutputItem | None = None
        self._held: list[Token] = []  # tokens whose text has made no event yet
        self._reasoning = ReasoningTokens(None if answer_format is None else answer_format.end_of_reasoning)

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning so far, with its markers."""
        return self._reasoning.total

    def feed(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, *, final: bool
    ) -> Iterator[StreamEvent]:
        """Add a piece of the answer; yields the events that it makes."""
        events = self._parse(text, final=final)
        if self._parser is not None:
            self._reasoning.add(token_ids, self._parser)
        ranked: Sequence[TokenLogprobs | None] = logprobs or [None] * len(token_ids)
        tokens: list[Token] = list(zip(token_ids, ranked, strict=True))
        if not events:
            self._held += tokens
            return
        kind = _ITEMS[type(events[-1])]
        held, self._held = self._held, []
        if self._open is None or isinstance(self._open, MessageItem | kind):
            tokens = held + tokens
        written = self._logprobs(tokens) if self._logprobs is not None and kind is MessageItem else []
        for event in events:
            yield from self._add(event, written if event is events[-1] else [])

    def finish(self, *, is_complete: bool) -> Iterator[StreamEvent]:
        """End the last item; an answer without any has an empty message."""
        if self._open is None:
            self._open = MessageItem(0)
            yield from self._open.start()
        yield from self._close("completed" if is_complete else "incomplete")

    def items(self) -> list[dict[str, Any]]:
        """Return the items so far; one that is not finished is incomplete."""
        return self._finished if self._open is None else [*self._finished, self._open.item("incomplete")]

    def _parse(self, text: str, *, final: bool) -> Sequence[Event]:
        if self._parser is not None:
            return self._parser.feed(text, final=final)
        return [Content(text)] if text else []

    def _add(self, event: Event, logprobs: list[dict[str, Any]]) -> Iterator[StreamEvent]:
        """Add an event of the parser to the open item, or to a new one."""
        if isinstance(event, CallStart) or not isinstance(self._open, _ITEMS[type(event)]):
            yield from self._close("completed")
            self._open = self._new_item(event)
            yield from self._open.start()
        assert self._open is not None
        if isinstance(self._open, MessageItem):
            assert isinstance(event, Content)
            yield self._open.add_with_logprobs(event.text, logprobs)
        elif not isinstance(event, CallStart):
            yield self._open.add(event.text)

    def _new_item(self, event: Event) -> OutputItem:
        index = len(self._finished)
        if isinstance(event, CallStart):
            return CallItem(index, event.name, self._new_call_id(event))
        return MessageItem(index) if isinstance(event, Content) else ReasoningItem(index)

    def _close(self, status: str) -> Iterator[StreamEvent]:
        if self._open is not None:
            yield from self._open.finish(status)
            self._finished.append(self._open.item(status))
            self._open = None
