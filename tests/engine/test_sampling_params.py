"""SamplingParams: the values that are refused, and the messages."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.errors import PromptTooLongError, RequestError
from engine.sampling_params import _DEFAULTS, _RULES, SamplingParams

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
    ("n", 0),
    ("n", 129),
    ("n", 1.0),
    ("best_of", 0),
    ("best_of", 129),
    ("beam_width", 0),
    ("beam_width", 65),
    ("length_penalty", float("inf")),
    ("length_penalty", 10.5),
    ("early_stopping", "always"),
    ("early_stopping", None),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 1e-300),
    ("repetition_penalty", 2000),
    ("logit_bias", 5),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"x": 1.0}),
    ("logit_bias", {"٣": 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {1: 100.5}),
    ("logit_bias", {1: float("nan")}),
    ("logit_bias", {1: None}),
    ("allowed_token_ids", [True]),
    ("bad_words", "word"),
    ("bad_words", [""]),
    ("bad_words", ["x"] * 129),
    ("bad_words_token_ids", [[]]),
    ("bad_words_token_ids", [[1] * 65]),
    ("bad_words_token_ids", [[-1]]),
    ("bad_words_token_ids", [3]),
    ("logprobs", -2),
    ("logprobs", True),
    ("prompt_logprobs", -2),
    ("prompt_logprobs", 1.0),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: str(value)[:20])
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    shown = (
        value[0] if isinstance(value, list) and len(value) == 1 else len(value) if isinstance(value, list) else value
    )
    while isinstance(shown, list | dict):  # the message shows the bad part
        [part] = shown.items() if isinstance(shown, dict) else [(0, len(shown) if len(shown) != 1 else shown[0])]
        shown = part[0] if part[1] == 1.0 else part[1]
    assert str(shown)[:15] in str(caught.value)
    assert len(str(caught.value)) < 200


def test_the_limits_themselves_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, seed=-(2**63), max_tokens=1, min_tokens=1)
    SamplingParams(n=128, best_of=128, presence_penalty=-2, frequency_penalty=2, logprobs=-1, prompt_logprobs=-1)
    SamplingParams(repetition_penalty=2**-10, length_penalty=-10, early_stopping="never", logit_bias={0: -100})
    SamplingParams(temperature=0, beam_width=64, n=64)
    SamplingParams(temperature=2.0, top_p=1e-9, top_k=10**9, seed=2**63 - 1, max_tokens=None, min_tokens=10**6)


def test_stop_may_be_one_string_or_many() -> None:
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_errors_keep_their_param_when_pickled() -> None:
    error = pickle.loads(pickle.dumps(PromptTooLongError("is too long", param="prompt")))
    assert (type(error), str(error), error.param) == (PromptTooLongError, "prompt is too long", "prompt")


COMBINATIONS: list[tuple[dict[str, Any], str]] = [
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"best_of": 2, "temperature": 0}, "best_of"),
    ({"beam_width": 2}, "temperature"),
    ({"beam_width": 2, "n": 3, "temperature": 0}, "n"),
    *(
        ({"beam_width": 2, "temperature": 0, name: value}, name)
        for name, value in {
            "best_of": 2, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": 1,
            "repetition_penalty": 2, "logit_bias": {1: 1}, "allowed_token_ids": [1], "bad_words": ["x"],
            "bad_words_token_ids": [[1]], "stop": "x", "logprobs": 0, "prompt_logprobs": 0,
        }.items()
    ),
]  # fmt: skip


@pytest.mark.parametrize(("values", "name"), COMBINATIONS, ids=lambda value: str(value)[:60])
def test_invalid_combinations_are_refused_by_name(values: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert caught.value.param == name
    assert name in str(caught.value)


def test_a_beam_search_allows_stop_conditions_and_neutral_values() -> None:
    params = SamplingParams(
        temperature=0,
        beam_width=4,
        n=2,
        min_tokens=2,
        stop_token_ids=[5],
        ignore_eos=True,
        max_tokens=9,
        top_k=-1,
        length_penalty=0.5,
        early_stopping=True,
        logit_bias={},
        bad_words=[],
        stop=[],
        presence_penalty=0,
    )
    assert (params.num_sequences, params.uses_beam_search, params.needs_logprobs) == (4, True, False)


def test_sequences_and_logprobs_that_a_request_needs() -> None:
    def needs(**values: Any) -> tuple[int, bool]:
        params = SamplingParams(**values)
        return params.num_sequences, params.needs_logprobs

    assert needs() == (1, False)
    assert needs(n=3) == (3, False)
    assert needs(n=3, best_of=3) == (3, False)
    assert needs(n=3, best_of=5) == (5, True)
    assert needs(logprobs=0) == (1, True)


def test_token_ids_are_normalised_and_named_for_the_check_against_a_vocabulary() -> None:
    params = SamplingParams(
        logit_bias={"7": 1, 5: -2}, allowed_token_ids=[3, 3, 4], bad_words_token_ids=[[1, 2], (1, 2), [9]]
    )  # type: ignore[arg-type, dict-item]
    assert params.logit_bias == {7: 1.0, 5: -2.0}
    assert dict(params.ids_by_parameter()) == {
        "logit_bias": (7, 5),
        "allowed_token_ids": (3, 4),
        "bad_words_token_ids": (1, 2, 9),
    }
    assert dict(SamplingParams(stop_token_ids=[8]).ids_by_parameter()) == {"stop_token_ids": (8,)}
    with pytest.raises(RequestError, match="the id 5 twice"):
        SamplingParams(logit_bias={"5": 1, 5: 1})  # type: ignore[dict-item]


def make(values: dict[str, Any]) -> SamplingParams | RequestError:
    """Return the parameters, or how they are refused; whatever else is raised fails the test."""
    try:
        return SamplingParams(**values)
    except RequestError as error:
        return error


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 200)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.sampled_from([10**400, -(10**400), 2**63, -(2**63), float("nan"), "\ud800", "1" * 5000, "never", 1j, str]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.none() | st.booleans() | st.integers() | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = SamplingParams.__struct_fields__
SANE = {
    "n": st.integers(1, 4),
    "best_of": st.none() | st.integers(1, 4),
    "beam_width": st.none() | st.integers(1, 3),
    "temperature": st.sampled_from([0, 0.0, 1.0]),
    "logit_bias": st.dictionaries(st.integers(0, 9), st.integers(-9, 9)),
    "bad_words_token_ids": st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3),
}


VALUES = st.dictionaries(st.sampled_from(NAMES), JUNK, max_size=3)
SANE_VALUES = st.fixed_dictionaries({}, optional=SANE)


@settings(max_examples=300, deadline=None)
@given(values=VALUES, sane=SANE_VALUES)
def test_junk_is_refused_or_makes_sense_but_raises_nothing_else(values: dict[str, Any], sane: dict[str, Any]) -> None:
    try_values(values, sane)


@pytest.mark.long
@settings(max_examples=1000, deadline=None)
@given(values=VALUES, sane=SANE_VALUES)
def test_more_junk(values: dict[str, Any], sane: dict[str, Any]) -> None:
    try_values(values, sane)


def try_values(values: dict[str, Any], sane: dict[str, Any]) -> None:
    """Make parameters of these values, which must be refused, or accepted again as they are kept."""
    params = make({**sane, **values})
    if isinstance(params, RequestError):
        assert params.param in NAMES
        assert params.param in str(params)
        assert len(str(params)) < 1000
        return
    assert pickle.loads(pickle.dumps(params)) == params
    assert replace(params) == params  # what is kept is accepted again
    assert 1 <= params.num_sequences <= 128
    assert all(token_id >= 0 for _, ids in params.ids_by_parameter() for token_id in ids)


def test_values_that_cannot_be_printed_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for name in NAMES:
        for junk in (10**5000, -(10**5000), deep, object()):
            for value in (junk, [junk], [[junk]], {1: junk}, {"9" * 5000: 1}, *([] if junk is deep else [{junk: 1}])):
                error = make({name: value})
                # Only where no size is too large does a number pass.
                assert isinstance(error, RequestError) or value in (10**5000, [10**5000], [[10**5000]], {10**5000: 1})
                assert not isinstance(error, RequestError) or error.param == name


def test_a_list_that_allows_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match="allows no token"):
        SamplingParams(allowed_token_ids=[])


def test_temperature_zero_is_greedy_and_not_refused() -> None:
    for temperature in (0, 0.0):
        assert SamplingParams(temperature=temperature).is_greedy


def test_a_temperature_that_float32_cannot_tell_from_zero_is_greedy() -> None:
    for temperature in (0, 0.0, 1e-300, 2.0**-150):
        assert np.float32(temperature) == 0
        assert SamplingParams(temperature=temperature).is_greedy
        for options in ({"n": 3}, {"best_of": 2}):
            with pytest.raises(RequestError, match="at temperature 0 gives equal answers"):
                SamplingParams(temperature=temperature, **options)
    least = math.nextafter(2.0**-150, 1.0)
    assert np.float32(least) > 0
    assert not SamplingParams(temperature=least, n=3).is_greedy


def test_defaults_are_stored_as_their_rules_return_them() -> None:
    """The constructor does not check a default."""
    params = SamplingParams()
    for name in NAMES:
        checked = _RULES[name](_DEFAULTS[name])
        assert (type(checked), checked) == (type(getattr(params, name)), getattr(params, name))
