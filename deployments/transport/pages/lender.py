"""PageLender lends pages of an engine to the threads of the page server; Loan hands a lease from one to the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.kv.tiers.departures import Lease
from engine.kv.tiers.digests import TokenChain

__all__ = ["Loan", "PageLender"]


class PageLender(Protocol):
    """Lends pages of an engine. Any thread may call it."""

    @property
    def block_bytes(self) -> int:
        """Bytes of all pages of a block."""

    def chain(self, token_ids: Sequence[int], cache_key: str) -> TokenChain:
        """Return the blocks of a text, as the engine names them."""

    def lend(
        self,
        chain: TokenChain,
        first_block: int,
        num_blocks: int,
        on_ready: Callable[[Lease | None], None],
        *,
        timeout_s: float,
    ) -> None:
        """Lease blocks of a text, and call ``on_ready`` in the engine's thread when they can be read.

        Args:
            chain: the text.
            first_block: index of the first block.
            num_blocks: blocks, at most.
            on_ready: receives the lease; None: the engine does not hold the first block. It is always called, unless
                the engine ends.
            timeout_s: seconds after which the lease expires.
        """

    def record(self, num_tokens: int, num_bytes: int) -> None:
        """Count what was sent."""


class Loan:
    """A lease that a thread waits for. If it no longer does, the lease is released as soon as it is ready."""

    def __init__(self) -> None:
        self._lease: Lease | None = None
        self._has_ended = threading.Event()
        self._lock = threading.Lock()

    def deliver(self, lease: Lease | None) -> None:
        """Hand the lease over. For the engine's thread."""
        with self._lock:
            if not self._has_ended.is_set():
                self._lease = lease
                self._has_ended.set()
                return
        if lease is not None:
            lease.release()

    def wait(self, timeout_s: float) -> Lease | None:
        """Return the lease; None if there is none.

        Raises:
            TimeoutError: the engine's thread has not lent in time.
        """
        if not self._has_ended.wait(timeout_s):
            self.abandon()
            raise TimeoutError(f"the engine has lent no page within {timeout_s:.1f} s")
        return self._lease

    def abandon(self) -> None:
        """End the wait, and the lease if it has come. Any thread may call this."""
        self.deliver(None)
        if self._lease is not None:
            self._lease.release()
