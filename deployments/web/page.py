"""WebPage: the web page at ``/``, its static files, and their security headers.

The files in static/ are plain HTML, CSS and JavaScript modules without a build step or external resources. They are
read once at start; browsers revalidate them by ETag. The page's data comes from the API and from ``GET /live``
(live_view.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.descriptions import Description
from deployments.api.routes import ApiRoute
from deployments.errors import ApiError
from deployments.web.live_view import LiveReplicas, LiveView

__all__ = ["WebPage"]

FOLDER = Path(__file__).with_name("static")
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    media_type: str
    etag: str

    def answer(self, request: Request) -> Response:
        """Return the file, or 304 if the browser's copy is current."""
        headers = _HEADERS | {"ETag": self.etag, "Cache-Control": "no-cache"}
        held = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self.etag in held:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, _TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


class WebPage:
    """The endpoints of the page, its files and its data.

    Args:
        model: the served name.
        replicas: returns the state of the engines and ingresses.
    """

    def __init__(self, model: str, replicas: LiveReplicas) -> None:
        self._live = LiveView(model, replicas)
        self._files = {path.name: _read(path) for path in FOLDER.iterdir() if path.suffix in _TYPES}

    def routes(self) -> list[ApiRoute]:
        """Return the endpoints."""
        return [
            ApiRoute("/", "GET", self.index, Description("page", media_type="text/html")),
            ApiRoute("/web/{name}", "GET", self.file, Description("page", media_type="*/*", statuses=frozenset({404}))),
            ApiRoute("/live", "GET", self.live, Description("server")),
        ]

    async def index(self, request: Request) -> Response:
        """Return the page itself."""
        return self._files[INDEX].answer(request)

    async def file(self, request: Request, name: str) -> Response:
        """Return one of the page's files."""
        if name not in self._files:
            raise ApiError(404, f"/web/{name[:80]} does not exist")
        return self._files[name].answer(request)

    async def live(self) -> Response:
        """Return the state of the cluster; live_view.py documents the JSON."""
        body = await self._live.body()
        return Response(body, media_type="application/json", headers=_HEADERS | {"Cache-Control": "no-store"})
