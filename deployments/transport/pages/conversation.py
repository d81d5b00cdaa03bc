"""Conversation: one connection to a page server, from the client's Hello until either side closes it.

Nothing that a client sends can do more than end its own connection. Pages are leased from the engine while they are
sent; a checksum that the lease has given is one of the right bytes, so the client notices what changes after that.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from time import monotonic
from typing import Final

from deployments.transport.pages.leases import Leases
from deployments.transport.pages.lender import PageLender
from deployments.transport.pages.messages import (
    BUSY,
    EVICTED,
    MAX_BLOCKS_BYTES,
    MAX_BLOCKS_PARTS,
    MAX_HELLO_BYTES,
    MISSING,
    VERSION,
    Blocks,
    End,
    FromClient,
    Hello,
    PageMessageError,
    Pull,
    Refusal,
    Welcome,
    decode_from_client,
)
from deployments.transport.pages.wire import Wire
from engine.kv.prefix_hash import BYTES_PER_TOKEN
from engine.kv.tiers.departures import Lease, LeaseExpiredError
from engine.kv.tiers.digests import TokenChain

__all__ = ["Conversation", "SecretError", "Terms"]

HELLO_S: Final = 5.0  # for the Hello and its answer
IDLE_S: Final = 300.0  # without a Pull
MAX_PULL_S: Final = 60.0  # that a client may ask to be waited for
STALL_S: Final = 5.0  # in which a client takes the pages of one message
MAX_WAIT_S: Final = 2.0  # of a Pull while others are answered: a burst of streams may move from one replica
PULL_BYTES: Final = 4096  # of a Pull beside its token ids


class SecretError(PageMessageError):
    """The client does not know the secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a server asks of its clients, and allows them.

    Attributes:
        secret: that a client must know.
        page_format: that its pages must have.
        max_tokens: of a prompt.
        pulls: how many more pulls may be answered at a time; shared by all connections.
    """

    secret: str
    page_format: Mapping[str, str]
    max_tokens: int
    pulls: threading.Semaphore


class Conversation:
    """Answers one client. Its thread may be blocked for as long as the deadlines say.

    Args:
        wire: the connection.
        terms: of the server.
        lender: lends the engine's pages.
    """

    def __init__(self, wire: Wire, terms: Terms, lender: PageLender) -> None:
        self._wire = wire
        self._terms = terms
        self._lender = lender
        self._leases: Leases | None = None
        self._is_cut = False

    def cut(self) -> None:
        """End the conversation soon. Any thread may call this."""
        self._is_cut = True
        self._wire.cut()
        if (leases := self._leases) is not None:
            leases.close()

    @property
    def is_sending(self) -> bool:
        """Whether pages are lent for the client."""
        return self._leases is not None

    def run(self) -> str:
        """Answer until the client goes; return why the client is to be refused, if it is.

        Raises:
            OSError: the connection has ended: as Wire.
            PageMessageError: the client's message is malformed, or it does not know the secret.
        """
        if reason := self._greet(monotonic() + HELLO_S):
            return reason
        while True:
            pull = self._receive(PULL_BYTES + BYTES_PER_TOKEN * self._terms.max_tokens, monotonic() + IDLE_S)
            if not isinstance(pull, Pull):
                raise PageMessageError(f"a second {type(pull).__name__}")
            self._answer(pull, monotonic() + min(pull.timeout_ms / 1000, MAX_PULL_S))

    def refuse(self, reason: str) -> None:
        """Tell the client why, instead of a welcome; raises OSError as Wire does."""
        self._wire.send(Refusal(reason), monotonic() + HELLO_S)

    def _receive(self, max_bytes: int, deadline: float) -> FromClient:
        return decode_from_client(self._wire.receive(max_bytes, deadline))

    def _greet(self, deadline: float) -> str:
        """Welcome a client whose pages are like ours; return how they differ otherwise."""
        hello = self._receive(MAX_HELLO_BYTES, deadline)
        if not isinstance(hello, Hello):
            raise PageMessageError(f"a {type(hello).__name__} before the Hello")
        if not hmac.compare_digest(hello.secret.encode(errors="replace"), self._terms.secret.encode()):
            raise SecretError("a Hello has a wrong secret")
        reason = _difference(hello, self._terms.page_format)
        if not reason:
            self._wire.send(Welcome(), deadline)
        return reason

    def _answer(self, pull: Pull, deadline: float) -> None:
        chain = self._lender.chain(pull.tokens, pull.cache_key)
        if not self._terms.pulls.acquire(timeout=max(0.0, min(MAX_WAIT_S, (deadline - monotonic()) / 2))):
            self._wire.send(End(BUSY), deadline)
            return
        try:
            reason = self._send_pages(pull, chain, deadline)
        finally:
            self._terms.pulls.release()
        self._wire.send(End(reason), monotonic() + HELLO_S)

    def _send_pages(self, pull: Pull, chain: TokenChain, deadline: float) -> str:
        """Send what the engine holds of the blocks; return why not all of them, in one word."""
        first, end = pull.first_block, min(pull.first_block + pull.num_blocks, chain.num_blocks)
        if first >= end:
            return ""
        chain.block_hash(end - 1, chain.block_size)  # so that the engine's thread need not hash
        leases = Leases(self._lender, chain, first, end, deadline)
        self._leases = leases
        try:
            with closing(leases.parts()) as lent:
                for blocks, pages in (message for lease in lent for message in _messages(lease)):
                    self._wire.send(blocks, min(deadline, monotonic() + STALL_S), pages)
                    self._lender.record(len(blocks.sizes) * chain.block_size, sum(map(len, pages)))
        except LeaseExpiredError:
            return EVICTED
        except TimeoutError:
            return BUSY
        finally:
            self._leases = None
            leases.close()
        return "" if leases.has_all else MISSING


def _messages(lease: Lease) -> Iterator[tuple[Blocks, list[memoryview]]]:
    """Yield runs of leased blocks of bounded size, and their pages; raises LeaseExpiredError."""
    blocks, parts, num_bytes = Blocks(lease.first_block, [], []), list[memoryview](), 0
    for index, pages in enumerate(lease.pages):
        sizes = [0 if page is None else len(page) for page in pages]
        is_full = num_bytes + sum(sizes) > MAX_BLOCKS_BYTES or len(parts) + len(pages) > MAX_BLOCKS_PARTS
        if blocks.sizes and is_full:
            yield blocks, parts
            blocks, parts, num_bytes = Blocks(lease.first_block + index, [], []), [], 0
        blocks.sizes.append(sizes)
        blocks.checksums.append(lease.checksums(index))
        parts += [page for page in pages if page is not None]
        num_bytes += sum(sizes)
    if blocks.sizes:
        yield blocks, parts


def _difference(hello: Hello, own: Mapping[str, str]) -> str:
    """Return in which way a client's pages differ; empty: in none."""
    if hello.version != VERSION:
        return f"version {hello.version} of the transfer, but this replica has {VERSION}"
    for name in sorted(own.keys() | hello.page_format.keys()):
        theirs, ours = hello.page_format.get(name), own.get(name)
        if theirs != ours:
            return f"{name} is {theirs!r}, but {ours!r} on this replica"
    return ""
