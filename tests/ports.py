"""Free TCP ports for servers that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Return a free TCP port, below those that systems give to clients: one of them might take it before the server."""
    while True:
        port = random.randrange(10_000, 20_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
