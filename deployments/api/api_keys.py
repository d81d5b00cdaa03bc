"""API keys. If keys are set, every path needs one, but for the routes that say that they need none.

Keys come from the environment of each node, ``PAGODA_API_KEYS`` (separated by commas or white space) or the file that
``PAGODA_API_KEYS_FILE`` names (one a line), and never from the YAML. Only their SHA-256 is kept, and each of them is
compared in constant time.

Clients send ``Authorization: Bearer KEY``, or ``X-Api-Key: KEY`` as Anthropic's do. A browser cannot do either when it
opens a page, so HTTP Basic with the key as password (and any user name) is accepted too: the browser prompts its user
for the key and then sends it with every request. It also sends it for a script or form of another site. A request with
Basic and a method other than GET or HEAD is therefore rejected unless it comes from Pagoda's own page. No cookie and no
script holds the key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api.error_responses import error_response
from deployments.api.middleware import path_of
from deployments.errors import ApiError
from engine.errors import ConfigError

__all__ = ["ApiKeys", "RequireKey", "owner_of"]

KEYS, KEYS_FILE = "PAGODA_API_KEYS", "PAGODA_API_KEYS_FILE"
MIN_LENGTH = 16  # characters
_OWNER = "pagoda.owner"  # the key of a scope that holds whose request it is
_HOW_TO_MAKE_ONE = "make one with: openssl rand -hex 32"


class ApiKeys:
    """The valid keys, as digests. Without keys, every request is allowed.

    Args:
        keys: the keys as text; they are not kept.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> ApiKeys:
        """Read the keys.

        Raises:
            ConfigError: if a source is given but holds no key, or an invalid key. The message never has a key.
        """
        keys: list[str] = []
        if (listed := environ.get(KEYS)) is not None:
            keys += _checked(re.split(r"[\s,]+", listed), KEYS)
        if (name := environ.get(KEYS_FILE)) is not None:
            keys += _checked(_lines(name), f"the file of {KEYS_FILE}")
        return cls(keys)

    def require(self) -> None:
        """Raise ConfigError if there are no keys."""
        if not self:
            raise ConfigError(
                f"{KEYS} or {KEYS_FILE} was set where the application was built and is not set on this node; "
                "set it on every node, before Ray starts there"
            )

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, key: bytes) -> bool:
        """Whether ``key`` is valid, in constant time."""
        digest = hashlib.sha256(key).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0  # all are compared


def _lines(name: str) -> list[str]:
    try:
        return [line.strip() for line in Path(os.path.expanduser(name)).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"{KEYS_FILE}='{name}' cannot be read ({reason}); name a file with one key a line, or unset it"
        ) from None


def _checked(candidates: list[str], source: str) -> list[str]:
    keys = [key for key in candidates if key]
    if not keys:
        raise ConfigError(f"{source} holds no key; unset the variable to serve without keys, or {_HOW_TO_MAKE_ONE}")
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_LENGTH:
            raise ConfigError(
                f"key {number} of {source} has {len(key)} characters, fewer than {MIN_LENGTH}; {_HOW_TO_MAKE_ONE}"
            )
        if not re.fullmatch(r"[!-~]+", key):
            raise ConfigError(f"key {number} of {source} has characters that no header can carry; {_HOW_TO_MAKE_ONE}")
    return keys


class RequireKey:
    """Middleware that rejects requests without a valid key.

    Args:
        app: the application to protect.
        keys: at least one key.
        open_paths: those that need none.
        prompts_browser: whether there is a web page, so that a browser that opens it should prompt for the key.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, *, open_paths: Container[str], prompts_browser: bool) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._prompts_browser = prompts_browser

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or reject it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008, "reason": "not offered"})
        elif path_of(scope) in self._open_paths or (rejection := self._rejection(scope)) is None:
            await self._app(scope, receive, send)
        else:
            await rejection(scope, receive, send)

    def _rejection(self, scope: Scope) -> Response | None:
        """Return the response that rejects a request, or None if it has a valid key."""
        headers = Headers(scope=scope)
        given = headers.get("x-api-key")  # no browser sends it by itself
        if given is not None and self._keys.accept(given.encode("latin-1")):
            scope[_OWNER] = _owner(given.encode("latin-1"))
            return None
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        scheme, key = scheme.lower(), _key(scheme.lower(), credentials.strip())
        if key is None or not self._keys.accept(key):
            return self._unauthorized(scope, headers, was_given=bool(scheme) or given is not None)
        if scheme == "basic" and scope["method"] not in ("GET", "HEAD") and not _is_from_our_page(headers):
            return _answer(ApiError(403, "requests from another site need Authorization: Bearer KEY"))
        scope[_OWNER] = _owner(key)
        return None

    def _unauthorized(self, scope: Scope, headers: Headers, *, was_given: bool) -> Response:
        prompt_browser = self._prompts_browser and path_of(scope) == "/" and "text/html" in headers.get("accept", "")
        problem = "the API key is wrong" if was_given else "an API key is needed"
        how = (
            "reload and give it as the password, with any user name"
            if prompt_browser
            else "send Authorization: Bearer KEY or X-Api-Key: KEY"
        )
        answer = _answer(ApiError(401, f"{problem}; {how}", code="invalid_api_key"))
        answer.headers["WWW-Authenticate"] = 'Basic realm="Pagoda", charset="UTF-8"' if prompt_browser else "Bearer"
        return answer


def owner_of(scope: Scope) -> str:
    """Return whose request it is: a digest of its API key, or nothing if no keys are set."""
    owner: str = scope.get(_OWNER, "")
    return owner


def _owner(key: bytes) -> str:
    return hashlib.sha256(b"pagoda owner " + key).hexdigest()[:32]


def _key(scheme: str, credentials: str) -> bytes | None:
    """Return the key in an Authorization header, or None if there is none."""
    if scheme == "bearer":
        return credentials.encode("latin-1")
    if scheme == "basic":
        try:
            return base64.b64decode(credentials, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return None
    return None


def _is_from_our_page(headers: Headers) -> bool:
    """Whether the request comes from Pagoda's page, or not from a browser."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site == "same-origin"
    return origin is None or origin.partition("://")[2] == headers.get("host")


def _answer(error: ApiError) -> Response:
    answer = error_response(error)
    answer.headers["Cache-Control"] = "no-store"
    return answer
