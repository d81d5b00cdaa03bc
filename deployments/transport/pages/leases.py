"""Leases: the pages of a long prompt, lent part by part: some are sent while the engine copies others to the host."""

from __future__ import annotations

from collections.abc import Generator
from time import monotonic
from typing import Final

from deployments.transport.pages.lender import Loan, PageLender
from engine.kv.tiers.departures import Lease
from engine.kv.tiers.digests import TokenChain

__all__ = ["Leases"]

LEASE_BYTES: Final = 16 * 2**20
MAX_LEASES: Final = 8  # of one prompt, or a few more where the host pool is small: each one takes the engine a step


class Leases:
    """Leases of consecutive blocks of a text, one after the other. While one is used the next one is made.

    One thread iterates; any thread may close.

    Args:
        lender: of the pages.
        chain: the text.
        first_block: index of the first block.
        end_block: after the last one.
        deadline: of all leases, a time of ``monotonic``.
    """

    def __init__(
        self, lender: PageLender, chain: TokenChain, first_block: int, end_block: int, deadline: float
    ) -> None:
        self._lender, self._chain = lender, chain
        self._next, self._end = first_block, end_block
        self._deadline = deadline
        self._max_blocks = max(
            1, LEASE_BYTES // max(1, lender.block_bytes), -(-(end_block - first_block) // MAX_LEASES)
        )
        self._is_closed = False
        self._loan = self._ask()

    @property
    def has_all(self) -> bool:
        """Whether all blocks were lent."""
        return self._next >= self._end

    def parts(self) -> Generator[Lease, None, None]:
        """Yield the leases, as long as the engine holds the blocks. Each ends when the next is asked for.

        Raises:
            TimeoutError: the engine's thread has not lent in time.
        """
        lease = self._wait()
        while lease is not None:
            try:
                self._next += lease.num_blocks
                self._loan = self._ask()
                yield lease
            finally:
                lease.release()
            if (lease := self._wait()) is None and not self.has_all:  # there may be room, now that one has ended
                self._loan = self._ask()
                lease = self._wait()

    def close(self) -> None:
        """End the wait for a lease, and the lease that is made."""
        self._is_closed = True
        self._loan.abandon()

    def _wait(self) -> Lease | None:
        return self._loan.wait(self._deadline - monotonic())

    def _ask(self) -> Loan:
        """Ask for the next lease, if there is one."""
        loan = Loan()
        if self.has_all or self._is_closed:
            loan.abandon()
        else:
            count = min(self._max_blocks, self._end - self._next)
            timeout_s = max(0.0, self._deadline - monotonic())
            self._lender.lend(self._chain, self._next, count, loan.deliver, timeout_s=timeout_s)
        return loan
