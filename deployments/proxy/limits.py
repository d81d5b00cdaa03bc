"""ProxyLimits: how many connections the proxy accepts, and how long it waits for a request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["ProxyLimits"]

# The environment variable of each limit.
VARIABLES = {
    "max_connections": "PAGODA_PROXY_MAX_CONNECTIONS",
    "max_connections_per_address": "PAGODA_PROXY_MAX_CONNECTIONS_PER_ADDRESS",
    "header_timeout_s": "PAGODA_PROXY_HEADER_TIMEOUT_S",
    "keep_alive_timeout_s": "PAGODA_PROXY_KEEP_ALIVE_TIMEOUT_S",
    "send_timeout_s": "PAGODA_PROXY_SEND_TIMEOUT_S",
}


@dataclass(frozen=True)
class ProxyLimits:
    """The limits, which the launcher and the pods pass on as environment variables.

    Attributes:
        max_connections: from all addresses together.
        max_connections_per_address: 0 is unlimited, for a server that only a load balancer connects to.
        header_timeout_s: seconds for the head of a request, from its connection or its first byte on.
        keep_alive_timeout_s: seconds that a connection may be idle after an answer.
        send_timeout_s: seconds for a client that does not read its answer, or is silent in a body that no one reads.
    """

    max_connections: int = 8192
    max_connections_per_address: int = 4096
    header_timeout_s: float = 10.0
    keep_alive_timeout_s: float = 10.0
    send_timeout_s: float = 60.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> ProxyLimits:
        """Return the limits in environment variables; those that are not set have their default.

        Raises:
            ValueError: one line that names the variable, its value and what it must be.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = VARIABLES[field.name]
            if name in environ:
                values[field.name] = _number(name, environ[name], type(field.default))
        return cls(**values)

    @property
    def environment(self) -> dict[str, str]:
        """The variables from which ``from_environment`` makes these limits."""
        return {variable: str(getattr(self, name)) for name, variable in VARIABLES.items()}


def _number(name: str, text: str, kind: type) -> float:
    least = 0 if name.endswith("_PER_ADDRESS") else 1
    try:
        number = int(text) if kind is int else float(text)
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:
        wanted = "an integer" if kind is int else "a number"
        raise ValueError(f"{name}='{text}' is out of range; give {wanted} of at least {least}")
    return number
