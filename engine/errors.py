"""The one tree of errors that Pagoda raises for what a user or an operator did, or what befell the engine.

An ``assert`` elsewhere in the code is a bug of ours; everything here is somebody's input or environment, and its
message carries the offending value and the remedy. Errors pickle, since they cross from a replica to the ingress.

    PagodaError
    ├── ConfigError          an option of the engine or of the deployment
    ├── ModelLoadError       a checkpoint that cannot be served
    ├── RequestError         one request; nothing else is disturbed
    │   ├── PromptTooLongError
    │   └── OverloadedError  later it may be served as it is
    ├── KVCacheError         a block or layer that the KV cache does not have
    └── EngineDeadError      the step loop has ended
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "EngineDeadError",
    "KVCacheError",
    "ModelLoadError",
    "OverloadedError",
    "PagodaError",
    "PromptTooLongError",
    "RequestError",
]


class PagodaError(Exception):
    """Base of every error that Pagoda raises on purpose."""


class ConfigError(PagodaError, ValueError):
    """An option is unknown, out of range, or does not fit this machine."""


class ModelLoadError(PagodaError):
    """A checkpoint is missing, incomplete, unsafe or of an architecture that is not served."""


class RequestError(PagodaError, ValueError):
    """One request is invalid; ``param`` names the offending parameter, as the OpenAI error body does."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(RequestError):
    """A prompt that can never fit the context or the KV cache."""


class OverloadedError(RequestError):
    """Nothing is wrong with the request, but others have taken what it needs; the same one may be served later."""

    replica: str = ""  # where, if whoever runs several engines says so


class KVCacheError(PagodaError, ValueError):
    """Somebody who inspects or moves KV blocks by hand named one that does not exist, or one target twice."""


class EngineDeadError(PagodaError):
    """The step loop has ended or is stuck; the message says why. Requests fail with it, and new ones are refused."""

    replica: str = ""  # where, if whoever runs several engines says so
