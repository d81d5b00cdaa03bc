"""What the official client expects: every response and event has exactly the fields that its types have."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from openai.types.responses.response_input_item import ResponseInputItem
from pydantic import BaseModel, TypeAdapter

__all__ = ["check_events", "check_items", "check_response", "events_of"]

# OpenAI sends these, too, and the Open Responses specification requires them; the client's types lack them.
ADDED = {"store", "presence_penalty", "frequency_penalty"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
INPUT_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseInputItem)
# The fields that the specification requires in every response, with null or a neutral value if there is nothing to say.
REQUIRED = ADDED | {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("top_logprobs", "temperature", "reasoning", "usage", "max_output_tokens", "max_tool_calls", "background"),
    *("service_tier", "metadata", "safety_identifier", "prompt_cache_key"),
}


def unknown_fields(model: Any, path: str = "") -> list[str]:
    """Return the paths of all fields that the types do not have."""
    if isinstance(model, list | tuple):
        return [unknown for index, item in enumerate(model) for unknown in unknown_fields(item, f"{path}[{index}]")]
    if not isinstance(model, BaseModel):
        return []
    allowed = ADDED if isinstance(model, Response) else set()
    unknown = [f"{path}.{name}" for name in model.model_extra or () if name not in allowed]
    for name in type(model).model_fields:
        unknown += unknown_fields(getattr(model, name), f"{path}.{name}")
    return unknown


def check_response(body: dict[str, Any]) -> Response:
    """Return a response as its type."""
    response = Response.model_validate(body, strict=True)
    assert not unknown_fields(response)
    assert body.keys() >= REQUIRED
    assert (body["status"] == "completed") == (body["completed_at"] is not None)
    assert (body["status"] == "incomplete") == (body["incomplete_details"] is not None)
    assert (body["status"] == "failed") == (body["error"] is not None)
    assert (body["status"] in ("completed", "incomplete")) == (body["usage"] is not None)
    for item in body["output"]:  # an answer can be sent back as it is
        INPUT_ITEM.validate_python(item)
    return response


def check_items(body: dict[str, Any]) -> ResponseItemList:
    """Return a list of input items as its type."""
    listed = ResponseItemList.model_validate(body, strict=True)
    assert not unknown_fields(listed)
    return listed


def events_of(text: str, first: int = 0) -> list[dict[str, Any]]:
    """Return the events of a stream: each has a line with its type, and the next number from ``first`` on."""
    assert text.endswith("\n\n")
    events = []
    blocks = [block for block in text.removesuffix("\n\n").split("\n\n") if not block.startswith(":")]  # a comment
    for number, block in enumerate(blocks, first):
        head, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def check_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response at the end of a stream, to which its events add up."""
    for event in events:
        assert not unknown_fields(EVENT.validate_python(event, strict=True))
    kinds = [event["type"] for event in events]
    stages = {"response.created": "in_progress", "response.in_progress": "in_progress"}
    if events[0]["response"]["background"]:
        stages = {"response.created": "queued", "response.queued": "queued", "response.in_progress": "in_progress"}
    assert kinds[: len(stages)] == list(stages)
    for event, status in zip(events, stages.values(), strict=False):
        assert check_response(event["response"]).status == status
        assert event["response"]["output"] == []
    last: dict[str, Any] = events[-1]["response"]
    check_response(last)
    assert kinds[-1] == f"response.{last['status']}"
    items = _joined(events[len(stages) : -1])
    if last["status"] != "failed":
        assert items == last["output"]
    return last


def _joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items that the events between the first two and the last add up to, as clients add them."""
    done: list[dict[str, Any]] = []
    item: dict[str, Any] = {}
    text, logprobs = "", list[Any]()
    for event in events:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(done)
        assert kind == "output_item.added" or event.get("item_id", item.get("id")) == item["id"]
        assert event.get("content_index", 0) == 0
        if kind == "output_item.added":
            assert not item
            item, text, logprobs = event["item"], "", []
            assert item["status"] == "in_progress"
            assert item.get("content", []) == []
            assert not item.get("arguments")
        elif kind == "content_part.added":
            assert event["part"]["text"] == ""
            item["content"].append(event["part"])
        elif kind.endswith(".delta"):
            assert event["delta"]
            text += event["delta"]
            logprobs += event.get("logprobs", [])
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == text
            item["arguments"] = text
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == text
            assert event.get("logprobs", []) == logprobs
            item["content"][0]["text"] = text
        elif kind == "content_part.done":
            assert [{**event["part"], "logprobs": []}] == [{**part, "logprobs": []} for part in item["content"]]
            assert len(event["part"].get("logprobs", [])) == len(logprobs)
            item["content"] = [event["part"]]
        else:
            assert kind == "output_item.done"
            assert event["item"] == {**item, "status": event["item"]["status"]}
            done.append(event["item"])
            item = {}
    return done
