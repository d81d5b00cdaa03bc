"""SamplingParams: what is refused, and how the refusal reads."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from engine.errors import PromptTooLongError, RequestError
from engine.sampling_params import SamplingParams

BAD: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", 2**63),
    ("seed", "one"),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("stop", 5),
    ("stop", {"a": 1}),
    ("stop_token_ids", 5),
    ("stop_token_ids", 0),
    ("stop_token_ids", [1] * 1025),
    ("temperature", 10**400),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("ignore_eos", 1),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: str(value)[:20])
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    shown = (
        value[0] if isinstance(value, list) and len(value) == 1 else len(value) if isinstance(value, list) else value
    )
    assert str(shown) in str(caught.value)


def test_the_limits_themselves_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, seed=-(2**63), max_tokens=1, min_tokens=1)
    SamplingParams(temperature=2.0, top_p=1e-9, top_k=10**9, seed=2**63 - 1, max_tokens=None, min_tokens=10**6)


def test_stop_may_be_one_string_or_many() -> None:
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_errors_keep_their_param_when_they_cross_processes() -> None:
    error = pickle.loads(pickle.dumps(PromptTooLongError("too long", "prompt")))
    assert (str(error), error.param) == ("too long", "prompt")
