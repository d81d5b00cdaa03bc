"""The texts in a body, checked in slices: pydantic checks a list in one call, which holds up all other threads."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from pydantic import ValidationInfo

from deployments.errors import ApiError
from deployments.large_json import STEP, yield_lock
from engine.errors import shown

__all__ = ["DOCUMENTS_SCHEMA", "INPUTS_SCHEMA", "TEXTS_SCHEMA", "TokenIds", "as_documents", "as_inputs", "as_texts"]

_TEXT = {"type": "string"}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
TEXTS_SCHEMA: dict[str, Any] = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}
INPUTS_SCHEMA: dict[str, Any] = {
    "anyOf": [_TEXT, {"type": "array", "items": _TEXT}, _TOKENS, {"type": "array", "items": _TOKENS}]
}
_DOCUMENT = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"], "additionalProperties": True}
DOCUMENTS_SCHEMA: dict[str, Any] = {"type": "array", "items": {"anyOf": [_TEXT, _DOCUMENT]}}
_MAX_ID = 2**31 - 1
_ONE_TEXT = "give a text, or a list of texts"
_ONE_INPUT = f"give a text, its token ids from 0 to {_MAX_ID}, or a list of either"

if TYPE_CHECKING:
    TokenIds = array[int]
else:  # before Python 3.12 it has no parameters
    TokenIds = array


def as_texts(value: object, info: ValidationInfo) -> list[str]:
    """Return a text, or a list of them, as a list; raises ApiError with status 400 for another value."""
    if isinstance(value, str):
        return [value]
    return _checked(value, str(info.field_name), _all_are(str), _ONE_TEXT)


def as_documents(value: object, info: ValidationInfo) -> list[str]:
    """Return the texts of documents, each a text or, as Cohere's and Jina's clients may send it, an object with one.

    Raises:
        ApiError: 400 that shows the first item of another kind.
    """
    remedy = 'give a list of texts, or of objects {"text": ...}'
    documents = _checked(value, str(info.field_name), _are_documents, remedy)
    return [item if isinstance(item, str) else item["text"] for item in documents]


def as_inputs(value: object, info: ValidationInfo) -> list[str | TokenIds]:
    """Return a text, or its token ids, or a list of either, as a list of texts and arrays of int32.

    Lists of ids are emptied slice by slice: to free millions of numbers at once takes as long as to check them.

    Raises:
        ApiError: 400 that shows the first item of another kind than these, or than the first one.
    """
    name = str(info.field_name)
    if isinstance(value, str):
        return [value]
    first = value[0] if isinstance(value, list) and value else ""
    if type(first) is int:
        return [_packed(_checked(value, name, _are_token_ids, _ONE_INPUT))]
    if not isinstance(first, list):
        return list(_checked(value, name, _all_are(str), _ONE_INPUT))
    lists: list[list[Any]] = _checked(value, name, _all_are(list), _ONE_INPUT)
    for start, several in _groups(lists):
        if len(several) == 1 or not _are_token_ids(list(chain.from_iterable(several))):
            for index, token_ids in enumerate(several, start):
                _checked(token_ids, f"{name}[{index}]", _are_token_ids, _ONE_INPUT)
    return [_packed(token_ids) for _, several in _groups(lists) for token_ids in several]


def _packed(token_ids: list[int]) -> TokenIds:
    """Return ids as an array, and empty their list."""
    packed = array("i", token_ids)
    while token_ids:
        del token_ids[-STEP:]
        if token_ids:
            yield_lock()
    return packed


def _checked(value: object, path: str, are_valid: Callable[[Sequence[Any]], bool], remedy: str) -> list[Any]:
    """Return a list if its items are valid; long lists are checked in slices.

    Raises:
        ApiError: 400 that shows the value if it is not a list, or its first invalid item.
    """
    if not isinstance(value, list):
        raise _invalid(path, value, remedy)
    for start, part in _slices(value):
        if not are_valid(part):
            index = next(index for index, item in enumerate(part) if not are_valid([item]))
            raise _invalid(f"{path}[{start + index}]", part[index], remedy)
    return value


def _slices(items: list[Any]) -> Iterator[tuple[int, Sequence[Any]]]:
    """Yield slices of at most STEP items, each with the index of its first one, and let other threads run between."""
    for start in range(0, len(items), STEP):
        if start:
            yield_lock()
        yield start, items if len(items) <= STEP else items[start : start + STEP]


def _groups(lists: list[list[Any]]) -> Iterator[tuple[int, list[list[Any]]]]:
    """Yield groups of lists with about STEP items together, as ``_slices`` does items."""
    start = size = 0
    for index, items in enumerate(lists, 1):
        size += len(items) + 1
        if size >= STEP or index == len(lists):
            yield start, lists[start:index]
            start, size = index, 0
            yield_lock()


def _all_are(kind: type) -> Callable[[Sequence[Any]], bool]:
    return lambda items: set(map(type, items)) <= {kind}


def _are_documents(items: Sequence[Any]) -> bool:
    if set(map(type, items)) <= {str}:
        return True
    return all(
        isinstance(item, str) or (isinstance(item, dict) and isinstance(item.get("text"), str)) for item in items
    )


def _are_token_ids(items: Sequence[Any]) -> bool:
    return set(map(type, items)) <= {int} and (not items or 0 <= min(items) <= max(items) <= _MAX_ID)


def _invalid(path: str, value: object, remedy: str) -> ApiError:
    return ApiError(400, f"{path}={shown(value)} is invalid: {remedy}", param=path.partition("[")[0])
