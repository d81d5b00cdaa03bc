"""StructuredOutputsParams: the form that one request's text must have.

The constructor checks the values and keeps them as immutable text, so an object can be hashed, compared, and pickled on
its way from the ingress to a replica. It does not know tokens; engine.structured_outputs compiles it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from msgspec import Struct
from msgspec.structs import force_setattr

from engine.errors import RequestError

__all__ = ["KINDS", "StructuredOutputsParams"]

MAX_SCHEMA_CHARACTERS = 64 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_GRAMMAR_CHARACTERS = 64 * 1024
MAX_REGEX_CHARACTERS = 16 * 1024
MAX_CHOICES = 4096
MAX_CHOICE_CHARACTERS = 64 * 1024  # all choices together

_PARAM = "structured_outputs"
KINDS = ("json", "regex", "choice", "grammar", "json_object")


class StructuredOutputsParams(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The form that a request's text must have; exactly one attribute is set. Names follow vLLM's.

    Attributes:
        json: a JSON schema (object, or its text; kept as text), nested at most 64 deep. The order of properties in the
            text is their order in the schema.
        regex: a regular expression that the whole text matches, without look-around or back-references.
        choice: strings; the text is one of them (kept as a tuple).
        grammar: a grammar in Lark's notation as llguidance extends it, or in GBNF (``root ::= ...``).
        json_object: true for any JSON object.

    Raises:
        RequestError: for any other value; its ``param`` is ``structured_outputs``.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            got = f"sets {' and '.join(given)}" if given else "sets nothing"
            _reject(got, f"give exactly one of {', '.join(KINDS)}")
        if self.json is not None:
            force_setattr(self, "json", _schema_text(self.json))
        elif self.choice is not None:
            force_setattr(self, "choice", _checked_choices(self.choice))
        elif self.regex is not None:
            _check_text("regex", self.regex, MAX_REGEX_CHARACTERS)
        elif self.grammar is not None:
            _check_text("grammar", self.grammar, MAX_GRAMMAR_CHARACTERS)
        elif self.json_object is not True:
            _reject(f"is {_short(self.json_object)}", "give true, or leave it out", "json_object")

    @property
    def kind(self) -> str:
        """The name of the one attribute that is set."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


def _reject(problem: str, remedy: str, kind: str | None = None) -> NoReturn:
    raise RequestError(problem, param=_PARAM, part=kind, remedy=remedy) from None


def _short(value: object) -> str:
    """Return a plain value, or the type of any other, as a message shows it."""
    return repr(value)[:60] if value is None or isinstance(value, str | bool | int | float) else type(value).__name__


def _check_text(name: str, text: object, longest: int) -> None:
    if not isinstance(text, str) or not text.strip():
        _reject(f"is {_short(text)}", "give text that is not empty", name)
    if len(text) > longest:
        _reject(f"has {len(text)} characters", f"give at most {longest}", name)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        _reject(
            f"has {text[error.start]!r}, an unpaired surrogate, which is not valid Unicode", "give valid text", name
        )


def _checked_choices(choices: object) -> tuple[str, ...]:
    if not isinstance(choices, list | tuple) or not choices:
        _reject(f"is {_short(choices)}", "give a list of strings that is not empty", "choice")
    if len(choices) > MAX_CHOICES:
        _reject(f"has {len(choices)} strings", f"give at most {MAX_CHOICES}", "choice")
    for choice in choices:
        _check_text("choice", choice, MAX_CHOICE_CHARACTERS)
    if (length := sum(map(len, choices))) > MAX_CHOICE_CHARACTERS:
        _reject(f"has {length} characters", f"give at most {MAX_CHOICE_CHARACTERS} in all", "choice")
    return tuple(choices)


def _schema_text(schema: object) -> str:
    """Return the text of a JSON schema that is an object, of bounded size and depth."""
    if isinstance(schema, str):
        _check_text("json", schema, MAX_SCHEMA_CHARACTERS)
        text, schema = schema, _parsed(schema)
    else:
        text = None
    if not isinstance(schema, dict):
        _reject(f"is {_short(schema)}", "give a JSON schema that is an object", "json")
    for number, depth in enumerate(_depths(schema)):
        if depth > MAX_SCHEMA_DEPTH:
            _reject(f"is nested deeper than {MAX_SCHEMA_DEPTH}", "use a flatter schema", "json")
        if number > MAX_SCHEMA_CHARACTERS:  # before json.dumps: shared parts may expand without end
            _reject(f"has more than {MAX_SCHEMA_CHARACTERS} values", "give a smaller schema", "json")
    if text is None:
        try:
            text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            _reject(f"is not JSON: {str(error)[:100]}", "give plain JSON values", "json")
        _check_text("json", text, MAX_SCHEMA_CHARACTERS)
    return text


def _parsed(text: str) -> object:
    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=no_constant)
    except RecursionError:
        _reject(f"is nested deeper than {MAX_SCHEMA_DEPTH}", "use a flatter schema", "json")
    except ValueError as error:
        _reject(f"is not JSON: {str(error)[:100]}", "give a JSON schema", "json")


def _depths(value: object) -> Iterator[int]:
    """Yield the depth of each value inside ``value``; an object or array without one inside has depth 1."""
    pending: list[tuple[object, int]] = [(value, 1)]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, dict | list | tuple):
            yield depth
            pending += [(inner, depth + 1) for inner in (value.values() if isinstance(value, dict) else value)]
        else:
            yield depth - 1
