"""Keys of the metadata that a replica publishes through Serve once it is ready (``record_replica_metadata``)."""

from __future__ import annotations

from typing import Final

__all__ = ["BLOCK_SIZE", "ENDPOINT"]

ENDPOINT: Final = "kv_events_endpoint"  # str, tcp://<address>:<port>: where its KV events and load reports come from
BLOCK_SIZE: Final = "block_size"  # int, tokens
