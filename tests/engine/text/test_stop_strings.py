"""Stop strings: where the text of a request ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.options.structured_outputs import StructuredOutputsParams
from engine.sampling_params import SamplingParams
from engine.text.stop_strings import StopStringFilter
from engine.text.text_stream import TextStream
from engine.text.tokenizer import Tokenizer
from tests.engine.text.tokenizers import KINDS, load_kind

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.text("abc", max_size=4), max_size=12), stops=STOPS, include=st.booleans())
def test_stop_strings_cut_at_the_first_match_however_the_text_is_split(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    text = "".join(pieces)
    matcher = StopStringFilter(stops, include_stop=include)
    shown = "".join(matcher.push(piece) for piece in pieces) + matcher.push("", final=True)
    first_end = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    if first_end is None:
        assert (shown, matcher.matched) == (text, None)
    else:
        # The stop that is complete first, piece by piece, ends the text; inside one piece the leftmost one does.
        assert matcher.matched in stops
        assert text.startswith(shown)
        assert shown.endswith(matcher.matched) if include else text[len(shown) :].startswith(matcher.matched)


def test_nothing_that_may_begin_a_stop_string_is_shown_early() -> None:
    matcher = StopStringFilter(["###"])
    assert matcher.push("a#") == "a"
    assert matcher.push("#") == ""
    assert matcher.push("b") == "##b"
    assert matcher.push("###c") == ""
    assert matcher.matched == "###"
    assert matcher.push("more") == ""


def test_of_two_stop_strings_at_the_same_position_the_longer_one_ends_the_text() -> None:
    matcher = StopStringFilter(["ab", "abc"], include_stop=True)
    assert matcher.push("xabcd") == "xabc"
    assert matcher.matched == "abc"


def test_without_stop_strings_all_text_is_shown_at_once() -> None:
    assert StopStringFilter([]).push("ab") == "ab"


def test_text_stream_shows_at_the_end_what_it_held_back(tokenizer: Tokenizer) -> None:
    """The start of a stop string, and a part of a character."""
    stream = TextStream(tokenizer, [], SamplingParams(stop="STOP"))
    assert stream.push(tokenizer.encode("keys STO")) == "keys "
    assert stream.push([], final=True) == "STO"
    cut = TextStream(tokenizer, [], SamplingParams(stop="STOP"))
    assert cut.push(tokenizer.encode("ST€")[:-1]) == ""
    assert cut.push([], final=True) == "ST\ufffd"


@pytest.mark.parametrize("stop", [None, "STOP"])
def test_text_stream_may_show_some_special_tokens(tokenizer: Tokenizer, stop: str | None) -> None:
    shown = tokenizer.special_token_ids(["<|im_start|>", "no special token"])
    assert len(shown) == 1
    stream = TextStream(tokenizer, [], SamplingParams(stop=stop), shown)
    assert stream.push(tokenizer.encode("a<|im_start|>b<|im_end|>c"), final=True) == "a<|im_start|>bc"


def test_text_stream_counts_the_tokens_up_to_the_stop_string(tokenizer: Tokenizer) -> None:
    """Tokens after the stop string are not counted, however many tokens arrive at once."""
    ids = tokenizer.encode("keys STOP values")
    stream = TextStream(tokenizer, [], SamplingParams(stop="STOP"))
    assert stream.push(ids) == "keys "
    assert stream.stop_string == "STOP"
    assert tokenizer.decode(ids[: stream.num_tokens]).endswith("STOP")


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x STOP y STOP z")
    first = next(i for i in range(len(ids)) if "STOP" in tokenizer.decode(ids[: i + 1])) + 1
    stream = TextStream(tokenizer, [], SamplingParams(stop="STOP", min_tokens=first, max_tokens=100))
    assert stream.push(ids) == "x STOP y "


@pytest.mark.parametrize("stops", [["STOP", "OP"], ["OP", "STOP"]])
def test_of_two_stop_strings_that_end_together_the_longer_one_ends_the_text(
    tokenizer: Tokenizer, stops: list[str]
) -> None:
    stream = TextStream(tokenizer, [], SamplingParams(stop=stops))
    assert stream.push(tokenizer.encode("keys STOP values")) == "keys "
    assert stream.stop_string == "STOP"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("byte")])
@pytest.mark.parametrize("stop", ["🙂", "日本", "é🎉", "\n🙂"])
def test_stop_strings_of_several_tokens_a_character_are_seen(kind: str, stop: str) -> None:
    tokenizer = load_kind(kind)
    for before in ("the 🎉", "line", "é日", "\n"):
        ids = tokenizer.encode(f"{before}{stop} next")
        streams = [TextStream(tokenizer, [], SamplingParams(stop=stop)) for _ in range(2)]
        one_by_one = "".join(streams[0].push([token_id]) for token_id in ids)
        assert one_by_one == streams[1].push(ids) == tokenizer.decode(ids).partition(stop)[0]
        assert streams[0].stop_string == streams[1].stop_string == stop


@pytest.mark.parametrize("stop", [None, "STOP"])
def test_the_token_that_ends_an_answer_is_not_text(tokenizer: Tokenizer, stop: str | None) -> None:
    """As in vLLM, whether it is an EOS token of the model or one of the request, and whatever is skipped."""
    eos, period = 2, tokenizer.encode(".")[0]
    ids = tokenizer.encode("the keys")
    for end, asked, options, text in (
        (eos, (), {}, "the keys"),
        (period, (period,), {}, "the keys"),
        (period, (), {}, "the keys."),
        (eos, (), {"include_stop_str_in_output": True}, "the keys</s>"),
        (eos, (), {"ignore_eos": True}, "the keys</s>"),
        (eos, (), {"min_tokens": 100, "max_tokens": 100}, "the keys</s>"),
    ):
        params = SamplingParams(stop=stop, stop_token_ids=asked, skip_special_tokens=False, **options)
        stream = TextStream(tokenizer, [5], params, end_token_ids=[eos])
        assert stream.push([*ids, end], final=True) == text, (end, asked, options)
        assert stream.num_tokens == len(ids) + 1
    in_the_middle = TextStream(tokenizer, [5], SamplingParams(stop=stop, stop_token_ids=[period]), end_token_ids=[eos])
    assert in_the_middle.push([period]) + in_the_middle.push(ids, final=True) == ".the keys"


def test_a_parser_sees_the_special_token_that_ends_its_part(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, [5], SamplingParams(), frozenset({2}), end_token_ids=[2])
    assert stream.push([*tokenizer.encode("keys"), 2], final=True) == "keys</s>"


def test_a_text_with_a_form_keeps_its_first_space() -> None:
    """The grammar has asked for it. A text without one begins as decode has it."""
    tokenizer = load_kind("byte-fallback, legacy")
    ids = tokenizer.encode("the keys")
    for form, text in ((StructuredOutputsParams(choice=[" the keys"]), " the keys"), (None, "the keys")):
        params = SamplingParams(structured_outputs=form)
        assert TextStream(tokenizer, [1], params).push(ids, final=True) == text
