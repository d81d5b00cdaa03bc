"""StructuredOutputsParams: which values are accepted, and which errors the others raise."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.options.structured_outputs import StructuredOutputsParams
from tests.engine.structured_outputs.random_texts import (
    MODEL,
)

CYCLE: dict[str, Any] = {}
CYCLE["self"] = CYCLE
DOUBLING: Any = {}
for _ in range(60):  # writes out to 2**60 objects
    DOUBLING = {"a": DOUBLING, "b": DOUBLING}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"regex": "a", "choice": ["a"]},
        {"json_object": False},
        {"json_object": 1},
        {"regex": ""},
        {"regex": 5},
        {"regex": "a" * 100_000},
        {"regex": "\ud800"},
        {"grammar": " "},
        {"grammar": b"start: A"},
        {"choice": []},
        {"choice": "ab"},
        {"choice": ["a", ""]},
        {"choice": ["a", None]},
        {"choice": ["a"] * 100_000},
        {"choice": ["\udc00"]},
        {"choice": {"a": 1}},
        {"json": ""},
        {"json": "{"},
        {"json": "[1]"},
        {"json": "true"},
        {"json": []},
        {"json": 3.5},
        {"json": '{"const": NaN}'},
        {"json": {"const": float("inf")}},
        {"json": {"const": object()}},
        {"json": {"const": "\ud800"}},
        {"json": {("a",): 1}},
        {"json": {"description": "x" * 100_000}},
        {"json": {"enum": list(range(100_000))}},
        {"json": '{"items":' * 65 + "{}" + "}" * 65},
        {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
        {"json": CYCLE},
        {"json": DOUBLING},
    ],
    ids=lambda options: str(options)[:40] if options and options.get("json") not in (CYCLE, DOUBLING) else "shared",
)
def test_what_cannot_be_asked_for_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**options)
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 400
    assert str(caught.value).encode()


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.just(object()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["json", "regex", "choice", "grammar", "json_object"]), JUNK, max_size=2))
def test_junk_of_any_type_raises_nothing_but_request_errors(options: dict[str, Any]) -> None:
    try:
        params = StructuredOutputsParams(**options)
    except RequestError:
        return
    assert hash(params) == hash(pickle.loads(pickle.dumps(params)))


def test_depth_of_64_is_accepted_and_schemas_become_text() -> None:
    StructuredOutputsParams(json='{"items":' * 63 + "{}" + "}" * 63)
    params = StructuredOutputsParams(json={"type": "object", "properties": {"z": True, "a": True}})
    assert params.json == '{"type": "object", "properties": {"z": true, "a": true}}'
    assert params.kind == "json"
    assert pickle.loads(pickle.dumps(params)) == params


def test_requests_are_checked_without_torch_and_llguidance() -> None:
    code = (
        "import sys, engine.options.structured_outputs, engine.structured_outputs.compiler;"
        "assert not {'torch', 'llguidance', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=MODEL.parents[1])
