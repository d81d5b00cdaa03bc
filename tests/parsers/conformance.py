"""The conformance suite of tool and reasoning parsers: ``python -m tests.parsers.conformance [FORMAT ...]``.

For each format it writes answers as the models do, with arguments that are hard to parse, and cuts them into pieces.
A parser passes if content, reasoning and calls come back exactly, and do not depend on how the text is cut, also if the
text is damaged. Other parsers are run with ``--parser MODULE:FUNCTION``; the function is a ``Parse``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tests.parsers.writers import WRITERS, Call, Writer

__all__ = ["TOOLS", "Answer", "Parse", "failures", "pagoda"]

_PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "tags": {"type": "array"},
    "options": {"type": "object"},
}
TOOLS: dict[str, Any] = {"edit": {"type": "object", "properties": _PROPERTIES}, "ping": {"type": "object"}}
_STRINGS = (
    *("", "None", "3", "true", '{"a": [1]}', 'it\'s a "quoted" \\ path', "line\n\nbreak\ttab", "東京 – é 🎉"),
    *("<b>x</b> </param <|tool", "f(x=[1], y={})", "```json\n{}\n```"),
)
_CALLS: tuple[tuple[Call, ...], ...] = (
    (("ping", {}),),
    (("edit", {"count": -3, "ratio": 1.5e-07, "flag": False}),),
    (("edit", {"options": {"a": {"b": [1, {"c": None}]}, "s": "x]}"}, "tags": ["a", 1, True, None, {"k": "v"}]}),),
    (("edit", {"path": "a.txt", "text": "x\n"}), ("ping", {}), ("edit", {"count": 2, "flag": True})),
)
_NUM_RANDOM_CUTS = 3
_NUM_DAMAGED = 6


@dataclass
class Answer:
    """What a parser has found in an answer.

    Attributes:
        calls: the functions' names and the JSON texts of the arguments.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


# Parses one answer. Its arguments: the format, a key of WRITERS; the request's tools, JSON schemas of parameters by
# name; the answer's text, in the pieces in which it arrives.
Parse: TypeAlias = Callable[[str, Mapping[str, Any], Sequence[str]], Answer]


def pagoda(format: str, tools: Mapping[str, Any], pieces: Sequence[str]) -> Answer:
    """Parse an answer with Pagoda's own parsers."""
    from deployments.parsers.answer_parser import AnswerParser
    from deployments.parsers.events import CallStart, Content, Reasoning
    from deployments.parsers.registry import Parsers

    family = Parsers(format, WRITERS[format].reasoning).family(tools, "")
    assert family is not None
    parser, answer = AnswerParser(family), Answer()
    events = [event for piece in pieces for event in parser.feed(piece)]
    for event in [*events, *parser.feed("", final=True)]:
        if isinstance(event, CallStart):
            answer.calls.append((event.name, ""))
        elif isinstance(event, Content):
            answer.content += event.text
        elif isinstance(event, Reasoning):
            answer.reasoning += event.text
        else:
            name, arguments = answer.calls[-1]
            answer.calls[-1] = name, arguments + event.text
    return answer


def failures(format: str, parse: Parse = pagoda) -> Iterator[str]:
    """Yield a sentence for each answer of a format that ``parse`` does not read, or reads otherwise if it is cut."""
    writer, rng = WRITERS[format], random.Random(format)
    texts = []
    for reasoning, content, calls in _scenes(writer):
        text = writer.answer(reasoning, content, calls)
        texts.append(text)
        whole = parse(format, TOOLS, [text])
        if (problem := _difference(whole, reasoning, content, calls)) is not None:
            yield f"{format}: {problem} of {text!r}"
        yield from _cut_failures(format, parse, text, whole, rng)
    for _ in range(_NUM_DAMAGED):
        text = _damaged(rng.choice(texts), rng)
        yield from _cut_failures(format, parse, text, parse(format, TOOLS, [text]), rng)


def _scenes(writer: Writer) -> Iterator[tuple[str, str, Sequence[Call]]]:
    """Yield reasoning, content and calls of answers."""
    yield "", "Plain text, 1 < 2.", ()
    content = "Let me look." if writer.has_text_before_calls else ""
    reasoning = "First, 1 < 2.\n\nThen." if writer.reasoning is not None else ""
    for calls in _CALLS:
        yield "", "", calls
    yield reasoning, content, _CALLS[-1]
    strings = (*_STRINGS, *(f"a {marker} b" for marker in writer.markers))
    for first, second in zip(strings, reversed(strings), strict=True):
        yield "", "", [("edit", {"path": first, "text": second})]
    if reasoning:
        yield reasoning, "Done.", ()


def _difference(answer: Answer, reasoning: str, content: str, calls: Sequence[Call]) -> str | None:
    try:
        parsed = [(name, json.loads(arguments)) for name, arguments in answer.calls]
    except ValueError:
        return f"no JSON in {answer.calls!r}"
    # Compared as JSON, in which True is not 1.
    if json.dumps(parsed, sort_keys=True) != json.dumps([list(call) for call in calls], sort_keys=True):
        return f"calls {parsed!r}"
    if answer.content.strip() != content:
        return f"content {answer.content!r}"
    return None if answer.reasoning.strip() == reasoning else f"reasoning {answer.reasoning!r}"


def _cut_failures(format: str, parse: Parse, text: str, whole: Answer, rng: random.Random) -> Iterator[str]:
    cuts = [list(text), *(_cut(text, rng) for _ in range(_NUM_RANDOM_CUTS))]
    for pieces in cuts:
        if (answer := parse(format, TOOLS, pieces)) != whole:
            yield f"{format}: {answer!r} of {pieces!r}, but {whole!r} of the text at once"


def _cut(text: str, rng: random.Random) -> list[str]:
    ends = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 12)))
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def _damaged(text: str, rng: random.Random) -> str:
    """Return a text without a part of it, or with a part twice."""
    start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    return text[:start] + text[end:] if rng.random() < 0.5 else text[:end] + text[start:]


_DESCRIPTION = """Test parsers of tool calls and reasoning: each format with arguments that are hard to parse and with
text that is cut anywhere. A parser passes if content, reasoning and calls come back exactly and do not depend on the
cuts."""
_PARSER_HELP = """a function that takes the format, the tools (JSON schemas of parameters by name) and the pieces of an
answer, and returns its content, reasoning and calls (Answer and Parse in tests/parsers/conformance.py); default:
%(default)s"""


def _loaded(parser: str) -> Parse:
    """Return the function that ``--parser`` names.

    Raises:
        ArgumentTypeError: if there is none.
    """
    module, _, name = parser.partition(":")
    try:
        parse: Parse = getattr(importlib.import_module(module), name)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{parser!r}: {error}; name a function as MODULE:FUNCTION") from error
    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; returns 1 if a parser fails."""
    options = argparse.ArgumentParser(prog="python -m tests.parsers.conformance", description=_DESCRIPTION)
    options.add_argument("formats", nargs="*", metavar="FORMAT", help=f"default: all: {', '.join(WRITERS)}")
    default = "tests.parsers.conformance:pagoda"
    options.add_argument("--parser", type=_loaded, default=default, metavar="MODULE:FUNCTION", help=_PARSER_HELP)
    given = options.parse_args(arguments)
    if unknown := set(given.formats) - set(WRITERS):
        options.error(f"unknown format {', '.join(sorted(unknown))}; choose from {', '.join(WRITERS)}")
    num_failed = 0
    for format in given.formats or WRITERS:
        problems = list(failures(format, given.parser))
        num_failed += bool(problems)
        print(f"{format:20} {'ok' if not problems else f'{len(problems)} failures'}")
        for failure in problems[:3]:
            print(f"    {failure}")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
