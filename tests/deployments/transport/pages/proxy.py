"""A TCP proxy in a thread, that can change the bytes which a server sends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from tests.deployments.transport.pages.fakes import HOST

CHUNK = 2**16


@contextmanager
def proxy(endpoint: str, change: Callable[[int, bytes], bytes]) -> Iterator[str]:
    """Yield the endpoint of a proxy; ``change`` gets the offset and the bytes of each piece that the server sends."""
    parts = urlsplit(endpoint)
    sockets: list[socket.socket] = []
    listening = socket.create_server((HOST, 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                server = socket.create_connection((parts.hostname, parts.port))
                sockets.extend((client, server))
                threading.Thread(target=copy, args=(client, server, lambda _, data: data), daemon=True).start()
                threading.Thread(target=copy, args=(server, client, change), daemon=True).start()

    def copy(source: socket.socket, target: socket.socket, change: Callable[[int, bytes], bytes]) -> None:
        offset = 0
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                target.sendall(change(offset, data))
                offset += len(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"tcp://{HOST}:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for each in (listening, *sockets):
            each.close()
