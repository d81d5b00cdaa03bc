"""The errors that Pagoda raises on purpose: for the input of a user or an operator, and for a failed engine.

A failed ``assert`` is a bug in Pagoda; every error here has a cause outside it. An error about a value carries the
name of the parameter, the value, the problem and the remedy as fields, and composes its message from them. Errors
pickle, since they travel from a replica to the ingress.

    PagodaError
    ├── InvalidValueError        a value is invalid
    │   ├── ConfigError          an option of the engine or of the deployment
    │   └── RequestError         one request; other requests are not affected
    │       ├── PromptTooLongError
    │       └── OverloadedError  the same request may succeed later
    ├── ModelLoadError           a checkpoint that cannot be served
    │   └── UnsupportedModelError  our own decoder does not compute it; another implementation may
    ├── KVCacheError             a block or layer that the KV cache does not have
    └── EngineDeadError          the step loop has ended
"""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Sequence
from typing import Self

__all__ = [
    "ConfigError",
    "EngineDeadError",
    "InvalidValueError",
    "KVCacheError",
    "ModelLoadError",
    "OverloadedError",
    "PagodaError",
    "PromptTooLongError",
    "RequestError",
    "UnsupportedModelError",
    "listed",
    "shown",
]

MAX_SHOWN = 80  # characters of a value in a message
MAX_LISTED = 8  # values of a message that has several
_NO_VALUE = object()


def shown(value: object) -> str:
    """Return ``value`` as a message shows it: at most 80 characters, and without an error whatever it is."""
    try:
        text = repr(value[:MAX_SHOWN]) if isinstance(value, str) else reprlib.repr(value)
    except Exception:  # an integer of 5,000 digits has no repr
        return f"<{type(value).__name__}>"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def listed(values: Sequence[object]) -> str:
    """Return ``values`` as a message shows several: the first ones, and how many more there are."""
    parts = [shown(value) for value in values[:MAX_LISTED]]
    more = f" and {len(values) - len(parts)} more" if len(values) > len(parts) else ""
    return ", ".join(parts) + more


class PagodaError(Exception):
    """Base of every error that Pagoda raises on purpose."""


class InvalidValueError(PagodaError, ValueError):
    """A value is invalid. The message reads ``param.part=value problem; remedy``, without the fields that are absent.

    Args:
        problem: what is wrong: a predicate whose subject is the parameter ("is out of range"), or a clause of its own
            if there is no parameter.
        param: name of the parameter, as in the OpenAI error body.
        part: the part of the parameter that is wrong, such as ``json`` of ``structured_outputs``.
        value: the invalid value; the error keeps it as short text.
        remedy: what to do instead, in the imperative.
    """

    def __init__(
        self,
        problem: str,
        *,
        param: str | None = None,
        part: str | None = None,
        value: object = _NO_VALUE,
        remedy: str | None = None,
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.param = param
        self.part = part
        self.value = None if value is _NO_VALUE else shown(value)
        self.remedy = remedy

    def __str__(self) -> str:
        subject = ".".join(name for name in (self.param, self.part) if name)
        if self.value is not None:
            subject += f"={self.value}"
        message = f"{subject} {self.problem}" if subject else self.problem
        return f"{message}; {self.remedy}" if self.remedy else message

    def renamed(self, param: str, part: str | None = None) -> Self:
        """Return this error about the parameter under the name that the user gave it."""
        error = copy.copy(self)
        error.param, error.part = param, part
        return error


class ConfigError(InvalidValueError):
    """An option is unknown, out of range, or does not fit this machine."""


class RequestError(InvalidValueError):
    """One request is invalid. Other requests are not affected."""


class PromptTooLongError(RequestError):
    """The prompt can never fit the context or the KV cache."""


class OverloadedError(RequestError):
    """The request is valid, but other requests use what it needs. The same request may succeed later."""

    replica: str = ""  # the name of the engine, where several engines run


class ModelLoadError(PagodaError):
    """A checkpoint is missing, incomplete, unsafe or of an architecture that is not served."""


class UnsupportedModelError(ModelLoadError):
    """A config is right, but asks for something that our own decoder does not compute."""


class KVCacheError(PagodaError, ValueError):
    """An explicit operation on KV blocks names a block that does not exist, or the same target twice."""


class EngineDeadError(PagodaError):
    """The step loop has ended or is stuck; the message says why. Every request fails with it, also new ones."""

    replica: str = ""  # the name of the engine, where several engines run
