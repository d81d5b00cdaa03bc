"""The items of a response's output while they are written: a message, reasoning, or a function call.

An item makes the events of its own stream, as dicts without their sequence numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from deployments.api.responses.input_items import new_id

__all__ = ["CallItem", "MessageItem", "OutputItem", "ReasoningItem", "StreamEvent"]

StreamEvent = dict[str, Any]


class OutputItem(ABC):
    """One item; text is added to it until it is finished.

    Args:
        index: of the item in the response's output.
    """

    prefix: ClassVar[str]  # of the item's id
    delta_type: ClassVar[str]  # of the events that carry pieces of its text

    def __init__(self, index: int) -> None:
        self.id = new_id(self.prefix)
        self.index = index
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def start(self) -> Iterator[StreamEvent]:
        """Yield the events before the first text."""
        item = self._item("in_progress", is_empty=True)
        yield {"type": "response.output_item.added", "output_index": self.index, "item": item}

    def add(self, text: str, **fields: Any) -> StreamEvent:
        """Add a piece of text; returns its event, which has the other ``fields``, too."""
        self._pieces.append(text)
        return self._event(f"{self.delta_type}.delta", delta=text, **fields)

    def finish(self, status: str) -> Iterator[StreamEvent]:
        """Yield the events after the last text."""
        item = self.item(status)
        yield {"type": "response.output_item.done", "output_index": self.index, "item": item}

    def item(self, status: str) -> dict[str, Any]:
        """Return the item as it is now."""
        return self._item(status, is_empty=False)

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        return {"type": kind, "item_id": self.id, "output_index": self.index, **fields}

    @abstractmethod
    def _item(self, status: str, *, is_empty: bool) -> dict[str, Any]:
        """Return the item; an empty one has no content."""


class _PartItem(OutputItem):
    """An item whose text is its only part of content."""

    def start(self) -> Iterator[StreamEvent]:
        """Yield the events that add the item and its part."""
        part = self._part("")
        yield from super().start()
        yield self._event("response.content_part.added", content_index=0, part=part)

    def add(self, text: str, **fields: Any) -> StreamEvent:
        """Add a piece of the part's text."""
        return super().add(text, content_index=0, **fields)

    def finish(self, status: str) -> Iterator[StreamEvent]:
        """Yield the events that end the text, the part and the item."""
        yield self._event(f"{self.delta_type}.done", content_index=0, text=self.text, **self._done_fields())
        yield self._event("response.content_part.done", content_index=0, part=self._part(self.text))
        yield from super().finish(status)

    def _done_fields(self) -> dict[str, Any]:
        return {}

    @abstractmethod
    def _part(self, text: str) -> dict[str, Any]:
        """Return the part with ``text``."""


class MessageItem(_PartItem):
    """A message to the user."""

    prefix = "msg"
    delta_type = "response.output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs: list[dict[str, Any]] = []

    def add_with_logprobs(self, text: str, logprobs: list[dict[str, Any]]) -> StreamEvent:
        """Add a piece of text and the log-probabilities of its tokens, as chat has them; none if not requested."""
        self._logprobs += logprobs
        return self.add(text, logprobs=[_without_bytes(entry) for entry in logprobs])

    def _done_fields(self) -> dict[str, Any]:
        return {"logprobs": [_without_bytes(entry) for entry in self._logprobs]}

    def _item(self, status: str, *, is_empty: bool) -> dict[str, Any]:
        content = [] if is_empty else [self._part(self.text)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "annotations": [], "logprobs": list(self._logprobs), "text": text}


class ReasoningItem(_PartItem):
    """The model's chain of thought."""

    prefix = "rs"
    delta_type = "response.reasoning_text"

    def _item(self, status: str, *, is_empty: bool) -> dict[str, Any]:
        content = [] if is_empty else [self._part(self.text)]
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}


class CallItem(OutputItem):
    """A function call; its text is its arguments.

    Args:
        index: of the item in the response's output.
        name: of the function.
        call_id: of the call.
    """

    prefix = "fc"
    delta_type = "response.function_call_arguments"

    def __init__(self, index: int, name: str, call_id: str) -> None:
        super().__init__(index)
        self._name = name
        self._call_id = call_id

    def finish(self, status: str) -> Iterator[StreamEvent]:
        """Yield the events that end the arguments and the item."""
        yield self._event(f"{self.delta_type}.done", arguments=self.text)
        yield from super().finish(status)

    def _item(self, status: str, *, is_empty: bool) -> dict[str, Any]:
        call = {"call_id": self._call_id, "name": self._name, "arguments": "" if is_empty else self.text}
        return {"id": self.id, "type": "function_call", "status": status, **call}


def _without_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a token's log-probability as events have it."""
    top = [{"token": likely["token"], "logprob": likely["logprob"]} for likely in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": top}
