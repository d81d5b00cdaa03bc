"""Large documents are decoded in steps, to what Python's own decoder returns, with its errors."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deployments.large_json import decode_json, yield_lock
from tests.waiting import HANG_S

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.sampled_from('a",]}[{:\\ \né漢\ud800')) | st.text()
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES | TEXTS,
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(TEXTS, inner, max_size=6),
    max_leaves=60,
)
INDENTS = st.sampled_from([None, 0, 2])
SEPARATORS = st.sampled_from([(",", ":"), (", ", ": "), (" ,", " : "), (",\n\t", ":\r\n")])


def expected(data: bytes) -> tuple[Any, str]:
    """Return what Python's decoder returns, or its error."""

    def reject(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number")

    try:
        return json.loads(data.decode("utf-8", "surrogatepass"), parse_constant=reject), ""
    except (ValueError, RecursionError) as error:
        return None, f"{type(error).__name__}: {error}"


def decoded(data: bytes | str, step: int) -> tuple[Any, str]:
    try:
        return decode_json(data, step=step, pause=lambda: None), ""
    except (ValueError, RecursionError) as error:
        return None, f"{type(error).__name__}: {error}"


def same(one: Any, two: Any) -> bool:
    """Whether two values are equal, with the types of their numbers and the order of their keys."""
    return repr(one) == repr(two)


@settings(max_examples=150)
@given(VALUES, INDENTS, SEPARATORS, st.booleans(), st.integers(1, 60))
def test_values_are_those_of_the_decoder(
    value: Any, indent: int | None, separators: tuple[str, str], is_ascii: bool, step: int
) -> None:
    text = json.dumps(value, indent=indent, separators=separators, ensure_ascii=is_ascii)
    data = text.encode("utf-8", "surrogatepass")
    assert same(decoded(data, step), expected(data))
    assert same(decoded(text, step), expected(data))


@settings(max_examples=250)
@given(VALUES, SEPARATORS, st.data(), st.integers(1, 40))
def test_errors_are_those_of_the_decoder(
    value: Any, separators: tuple[str, str], data: st.DataObject, step: int
) -> None:
    text = json.dumps(value, separators=separators, ensure_ascii=False)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 4)))
        text = text[:start] + data.draw(st.text(st.sampled_from('",[]{}:a1 \\N-.e'), max_size=4)) + text[end:]
    changed = text.encode("utf-8", "surrogatepass")
    assert same(decoded(changed, step), expected(changed))


@pytest.mark.parametrize(
    "text",
    [
        "[1,2,]", "[,1]", "[1,,2]", '{"a":1,}', '{"a" 1}', "{1:2}", "[1 2]", "[1,2", "[", "{", '{"a":', "", " ",
        "[1]]", "[NaN,1]", "[1,-Infinity]", '["a","b]', '[["],"],["],"]]', '["\\",","\\",",","]', "[[1,2],[3],[]]",
        '{"a":1,"a":{"b":2},"a":[3]}', "[" + "1" * 5000 + ",1]",
        '[{"a":[{"b":1},{"c":2}]},{"d":3}]',
    ],
)  # fmt: skip
def test_what_a_cut_may_mistake(text: str) -> None:
    for step in (1, 2, 3, 5, 8, 13, 64):
        assert same(decoded(text.encode(), step), expected(text.encode())), step


def nested(inner: str, depth: int) -> str:
    """Return a document with ``depth`` containers, of both kinds, around a value."""
    return '[{"a":' * (depth // 2) + inner + "}]" * (depth // 2)


@pytest.mark.parametrize("depth", [6, 8, 10, 30, 32, 34, 200])
def test_short_values_may_be_deep_and_long_ones_pause(depth: int) -> None:
    short = nested("[1,2]", depth) + " " * 2**12
    assert same(decoded(short, 2**12), expected(short.encode()))
    num_pauses = 0

    def pause() -> None:
        nonlocal num_pauses
        num_pauses += 1

    long = nested(str(list(range(50_000))), depth)
    if depth < 32:
        assert decode_json(long, step=2**12, pause=pause) == json.loads(long)
        assert num_pauses >= len(long) / 2**13 - 1
    else:
        with pytest.raises(RecursionError, match="^32 containers around one of more than 4096 characters, at char 96$"):
            decode_json(long, step=2**12, pause=pause)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_documents_that_are_nested_too_deeply_are_refused(text: str) -> None:
    for step in (1, 13, 2**16, 2**20):
        with pytest.raises(RecursionError):
            decode_json(text, step=step, pause=lambda: None)


@pytest.mark.parametrize("step", [1, 2**16])
def test_a_byte_order_mark_is_as_for_the_decoder(step: int) -> None:
    data = '\ufeff[1, "é"]'.encode()
    assert decoded(data, step) == ([1, "é"], "")
    assert same(decoded(data.decode(), step), expected(data))


@given(st.binary(max_size=60), st.integers(1, 20))
@example(b'["\xff", 1]', 4)
@example(b'["' + b"\x80" * 20 + b'"]', 4)
def test_what_is_not_utf_8_is_an_error(data: bytes, step: int) -> None:
    if json.detect_encoding(data) == "utf-8":
        assert same(decoded(data, step), expected(data))
    encoded = json.dumps(["é" * 30]).encode("utf-16")
    assert decode_json(encoded, step=step, pause=lambda: None) == ["é" * 30]


DOCUMENTS = {
    "texts": {"input": ["word " * 200] * 300},
    "token ids": {"input": list(range(60_000))},
    "lists of token ids": {"input": [list(range(300))] * 200},
    "messages": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a, b"}]}] * 5000},
    "nested": {"a": {"b": {"c": [[{"d": list(range(50_000))}]]}}},
    "what looks like an end": {"input": ['",'] * 60_000},
    "what looks like the end of a list": {"input": [["],"]] * 30_000},
    "other characters": {"input": ["漢字" * 50] * 300},
    "many fields": {f"name{number}": number for number in range(15_000)},
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_there_is_a_pause_after_each_step(name: str) -> None:
    text = json.dumps(DOCUMENTS[name], ensure_ascii=False)
    num_pauses = 0

    def pause() -> None:
        nonlocal num_pauses
        num_pauses += 1

    step = 2**12
    assert decode_json(text, step=step, pause=pause) == DOCUMENTS[name]
    assert num_pauses >= len(text) / (2 * step) - 1


@pytest.fixture
def no_switches() -> Iterator[None]:
    """Threads switch only where one releases the interpreter's lock by itself."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10 * HANG_S)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("no_switches")
def test_a_pause_lets_another_thread_run() -> None:
    has_run, num_pauses = threading.Event(), 0

    def wait() -> None:
        nonlocal num_pauses
        while not has_run.is_set() and num_pauses < 10_000:
            yield_lock()
            num_pauses += 1

    waiting = threading.Thread(target=wait)
    waiting.start()
    has_run.set()
    waiting.join()
    assert num_pauses < 10_000
