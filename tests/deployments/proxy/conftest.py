"""A running HAProxy, and a server after it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from tests.deployments.proxy.proxies import HASTY, Ingress, Proxy, running


@pytest.fixture(scope="module")
def ingress() -> Iterator[int]:
    """Return the port of a running server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Ingress) as server:
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that resets its connection
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, ingress: int) -> Iterator[Proxy]:
    """Return a HAProxy that waits for clients for as long as a test may take. Each test closes its connections."""
    with running(tmp_path_factory.mktemp("proxy"), ingress) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def hasty_proxy(tmp_path_factory: pytest.TempPathFactory, ingress: int) -> Iterator[Proxy]:
    """Return a HAProxy that soon closes silent connections."""
    with running(tmp_path_factory.mktemp("hasty"), ingress, limits=HASTY) as proxy:
        yield proxy
