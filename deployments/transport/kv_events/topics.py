"""Topics: the ZeroMQ topics of one replica, which subscribers match by prefix.

e/<replica>/          EventsMessage
a/<replica>/          AwaitedMessage
l/<replica>/          LoadMessage
s/<replica>/<nonce>/  Snapshot, for the subscriber that chose the nonce; subscribing is the request for it
"""

from __future__ import annotations

import re
from urllib.parse import quote

from engine.errors import ConfigError

__all__ = ["NONCE_LENGTH", "Topics"]

MAX_NAME_LENGTH = 256
NONCE_LENGTH = 16  # hexadecimal digits

_NONCE = re.compile(rb"[0-9a-f]{%d}" % NONCE_LENGTH)


class Topics:
    """The topics of one replica. Each ends with a slash and names contain none, so no topic is a prefix of another's.

    Raises:
        ConfigError: ``replica`` is not a valid name.
    """

    def __init__(self, replica: str) -> None:
        if not 0 < len(replica) <= MAX_NAME_LENGTH or not replica.isprintable():
            raise ConfigError(
                f"replica={replica[:40]!r} is not a name; it needs 1 to {MAX_NAME_LENGTH} printable letters"
            )
        name = quote(replica, safe="").encode()
        self.events: bytes = b"e/" + name + b"/"
        self.awaited: bytes = b"a/" + name + b"/"
        self.load: bytes = b"l/" + name + b"/"
        self.snapshots: bytes = b"s/" + name + b"/"

    def snapshot(self, nonce: str) -> bytes:
        """Return the topic of the snapshot that is requested under ``nonce``."""
        return self.snapshots + nonce.encode() + b"/"

    def is_snapshot(self, topic: bytes) -> bool:
        """Return whether a subscription to ``topic`` requests a snapshot of this replica."""
        if not topic.startswith(self.snapshots) or not topic.endswith(b"/"):
            return False
        return _NONCE.fullmatch(topic[len(self.snapshots) : -1]) is not None
