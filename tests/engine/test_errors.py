"""The errors compose their messages of fields, pickle, and can be raised again under another name."""

from __future__ import annotations

import pickle

import pytest

from engine.errors import ConfigError, InvalidValueError, OverloadedError, PromptTooLongError, RequestError, shown


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RequestError("the queue is full"), "the queue is full"),
        (RequestError("the queue is full", remedy="try again later"), "the queue is full; try again later"),
        (RequestError("is empty", param="prompt"), "prompt is empty"),
        (RequestError("exceeds best_of=2", param="n", value=3, remedy="lower it"), "n=3 exceeds best_of=2; lower it"),
        (RequestError("is out of range", param="stop", value=None), "stop=None is out of range"),
        (ConfigError("is no JSON", param="structured_outputs", part="json"), "structured_outputs.json is no JSON"),
    ],
)
def test_the_message_is_composed_of_the_fields(error: InvalidValueError, message: str) -> None:
    assert str(error) == message


def test_a_renamed_error_differs_in_nothing_but_the_name() -> None:
    error = PromptTooLongError("has 9 tokens", param="prompt", remedy="shorten it")
    renamed = error.renamed("messages")
    assert (type(renamed), renamed.param, str(renamed)) == (
        PromptTooLongError, "messages", "messages has 9 tokens; shorten it",
    )  # fmt: skip
    assert str(error).startswith("prompt ")
    parts = RequestError("is no JSON", param="structured_outputs", part="json")
    assert str(parts.renamed("response_format", "json_schema")) == "response_format.json_schema is no JSON"
    assert str(parts.renamed("response_format")) == "response_format is no JSON"


@pytest.mark.parametrize("kind", [RequestError, PromptTooLongError, OverloadedError, ConfigError])
def test_errors_pickle_with_all_fields(kind: type[InvalidValueError]) -> None:
    error = kind("is bad", param="a", part="b", value=object(), remedy="change it")
    if isinstance(error, OverloadedError):
        error.replica = "r1"
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), vars(copy), str(copy)) == (kind, vars(error), str(error))


class Unprintable:
    def __repr__(self) -> str:
        raise OSError


@pytest.mark.parametrize(
    "value",
    [10**5000, [10**5000], "x" * 5000, ["x" * 5000] * 5000, {1: {2: {3: {4: [5] * 99}}}}, Unprintable()],
    ids=["digits", "a list of digits", "text", "a list of texts", "nested", "no repr"],
)
def test_any_value_is_shown_in_few_characters(value: object) -> None:
    assert 0 < len(shown(value)) <= 80
