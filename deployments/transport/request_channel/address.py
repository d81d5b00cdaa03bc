"""ReplicaAddress: where an ingress reaches a replica, as the replica's metadata says.

Serve passes the metadata to the ingresses over connections that it has authenticated. The channel's own ports are not:
every peer that knows the secret is an ingress.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["ReplicaAddress"]

_KEYS: Final = ("channel_requests", "channel_outputs", "channel_secret")


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """The endpoints of a replica's sockets, tcp://<address>:<port>, and the secret that it asks for."""

    requests: str
    outputs: str
    secret: str

    @property
    def metadata(self) -> dict[str, str]:
        """The address as a replica's metadata."""
        return dict(zip(_KEYS, (self.requests, self.outputs, self.secret), strict=True))

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> ReplicaAddress | None:
        """Return the address in a replica's metadata, if it has one."""
        values = [metadata.get(key) for key in _KEYS]
        return cls(*map(str, values)) if all(values) else None
