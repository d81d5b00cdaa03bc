"""PageAddress: where a replica serves its pages, as the replica's metadata says.

Serve passes the metadata to the ingresses over connections that it has authenticated, and the router names one address
in a request (``KVSource``). The port itself is not authenticated: every client that knows the secret may read pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["PageAddress"]

_KEYS: Final = ("pages_endpoint", "pages_secret")


@dataclass(frozen=True, slots=True)
class PageAddress:
    """The endpoint of a replica's page server, tcp://<address>:<port>, and the secret that it asks for."""

    endpoint: str
    secret: str

    @property
    def metadata(self) -> dict[str, str]:
        """The address as a replica's metadata."""
        return dict(zip(_KEYS, (self.endpoint, self.secret), strict=True))

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> PageAddress | None:
        """Return the address in a replica's metadata, if it has one."""
        values = [metadata.get(key) for key in _KEYS]
        return cls(*map(str, values)) if all(values) else None
