"""EventPublishers: the replicas' KV events over ZMQ, in vLLM's format."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from benchmarks.routing.rivals.prompts import Prompts
from benchmarks.routing.rivals.side import Events, Hashes

__all__ = ["EventPublishers"]


class EventPublishers:
    """A publishing socket for each replica."""

    def __init__(self, num_replicas: int, prompts: Prompts) -> None:
        self.prompts = prompts
        self.num_batches = [0] * num_replicas
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._sockets = [self._context.socket(zmq.XPUB) for _ in range(num_replicas)]  # XPUB shows subscriptions
        for publisher in self._sockets:
            publisher.setsockopt(zmq.SNDHWM, 0)
        self.endpoints = [
            f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}" for socket in self._sockets
        ]

    async def subscribed(self, seconds: float = 30.0) -> None:
        """Wait until the router has subscribed to every replica.

        Raises:
            TimeoutError: if it does not.
        """
        deadline = time.monotonic() + seconds
        for endpoint, publisher in zip(self.endpoints, self._sockets, strict=True):
            while not publisher.poll(0):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the router has not subscribed to {endpoint} within {seconds} s")
                await asyncio.sleep(0.01)
            publisher.recv()

    def stored(self, hashes: Hashes, parent: int | None, tokens: list[int]) -> dict[str, Any]:
        """Return the event of a stored chain of blocks."""
        return {
            "type": "BlockStored",
            "block_hashes": list(hashes),
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": self.prompts.block_size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }

    def removed(self, hashes: Hashes) -> dict[str, Any]:
        """Return the event of removed blocks."""
        return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}

    def by_replica(self, events: Sequence[Events]) -> dict[int, list[dict[str, Any]]]:
        """Return the events of replicas in vLLM's format."""
        batches: dict[int, list[dict[str, Any]]] = {}
        for replica, stored, removed in events:
            batch = batches.setdefault(replica, [])
            if stored:
                batch.append(self.stored(stored, self.prompts.parent[stored[0]], self.prompts.chain_tokens(stored)))
            if removed:
                batch.append(self.removed(removed))
        return batches

    def publish(self, replica: int, events: list[dict[str, Any]]) -> None:
        """Publish a batch."""
        batch = self._encoder.encode([time.time(), events, 0])
        self._sockets[replica].send_multipart([b"", struct.pack(">q", self.num_batches[replica]), batch])
        self.num_batches[replica] += 1

    def close(self) -> None:
        """Close the sockets."""
        for publisher in self._sockets:
            publisher.close(0)
        self._context.term()
