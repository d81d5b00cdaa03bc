"""An engine that lends pages from a dictionary, a sink in plain memory, and a server and a client around them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from deployments.observability.recorder import Recorder
from deployments.transport.pages.client import PageClient
from deployments.transport.pages.server import PageServer
from engine.kv.tiers.departures import Lease
from engine.kv.tiers.digests import TokenChain
from engine.kv.tiers.page_format import checksum
from engine.kv.tiers.source import WantedPrefix
from engine.observability.metrics import METRICS
from engine.request import KVSource
from tests.waiting import HANG_S

HOST = "127.0.0.1"
BLOCK_SIZE = 4
FORMAT = {"model": "m", "dtype": "float32", "block_size": str(BLOCK_SIZE)}
PROMPT = list(range(100, 140))


def chain_of(token_ids: Sequence[int], cache_key: str = "") -> TokenChain:
    return TokenChain(token_ids, BLOCK_SIZE, cache_key=cache_key, model="m", format_digest=b"f")


class Lender:
    """Lends the blocks of one prompt, at most ``lease_blocks`` at a time.

    Args:
        pages: of each block, of each kind.
    """

    def __init__(self, pages: list[list[bytes | None]], prompt: Sequence[int] = PROMPT) -> None:
        self.pages = pages
        self.prompt = prompt
        self.lease_blocks = 1000
        self.leases: list[Lease] = []
        self.num_released = 0
        self.num_sent = 0  # tokens
        self.held_back: list[Callable[[], None]] | None = None  # calls of on_ready, if they wait

    @property
    def block_bytes(self) -> int:
        return 2**20  # so that a lease is larger than a prompt of the tests

    def chain(self, token_ids: Sequence[int], cache_key: str) -> TokenChain:
        return chain_of(token_ids, cache_key)

    def lend(
        self,
        chain: TokenChain,
        first_block: int,
        num_blocks: int,
        on_ready: Callable[[Lease | None], None],
        *,
        timeout_s: float,
    ) -> None:
        own = self.chain(self.prompt, "")
        has = 0
        while has < min(len(self.pages), chain.num_blocks) and own.digest(has) == chain.digest(has):
            has += 1
        lease = None
        if first_block < has:
            end = min(has, first_block + min(num_blocks, self.lease_blocks))
            views = [[None if page is None else memoryview(page) for page in of] for of in self.pages[first_block:end]]
            lease = Lease(chain, first_block, views, self._released)
            self.leases.append(lease)
        if self.held_back is None:
            on_ready(lease)
        else:
            self.held_back.append(lambda: on_ready(lease))

    def record(self, num_tokens: int, num_bytes: int) -> None:
        self.num_sent += num_tokens

    def _released(self, lease: Lease) -> None:
        self.num_released += 1


class Sink:
    """Memory for blocks of a prompt: of each block, of each kind, a number of bytes; None: not wanted."""

    def __init__(self, first_block: int, sizes: list[list[int | None]]) -> None:
        self.first_block = first_block
        self.is_cancelled = False
        self.done: list[int] = []
        self.memory = [[None if size is None else bytearray(size) for size in of] for of in sizes]
        self.came: list[list[bool]] = []
        self.errors: list[str | None] = []
        self._has_finished = threading.Event()

    @property
    def num_blocks(self) -> int:
        return len(self.memory)

    def page_buffers(self, index: int) -> list[memoryview | None]:
        return [None if page is None else memoryview(page) for page in self.memory[index - self.first_block]]

    def block_done(self, index: int, checksums: Sequence[int | None]) -> bool:
        assert index == self.first_block + len(self.done)
        for page, expected in zip(self.page_buffers(index), checksums, strict=True):
            if page is not None and expected is not None and checksum(page) != expected:
                return False
        self.done.append(index)
        self.came.append([expected is not None for expected in checksums])
        return True

    def finished(self, error: str | None) -> None:
        self.errors.append(error)
        self._has_finished.set()

    def wait(self) -> str | None:
        """Wait for the end of the fetch; return its error."""
        assert self._has_finished.wait(HANG_S)
        assert len(self.errors) == 1, "finished() was called twice"
        return self.errors[0]

    def pages(self) -> list[list[bytes | None]]:
        """The blocks that have come."""
        return [[None if page is None else bytes(page) for page in of] for of in self.memory[: len(self.done)]]


def counts(recorder: Recorder, name: str) -> dict[tuple[str, ...], float]:
    """Return the values of a metric that are not 0, by its labels."""
    return {s.labels: s.value for s in recorder.snapshot() if s.metric.name == name and s.value}


class Pair:
    """A server and a client."""

    def __init__(self, lender: Any, server_format: dict[str, str], client_format: dict[str, str]) -> None:
        self.recorder = Recorder(METRICS)
        self.lender = lender
        self.server = PageServer(lender, HOST, max_tokens=10_000, metrics=self.recorder)
        self.server.open(server_format)
        self.client = PageClient(client_format, bytes_per_token=100.0, block_size=BLOCK_SIZE)

    @property
    def rejections(self) -> dict[tuple[str, ...], float]:
        return counts(self.recorder, "kv_peer_rejections")

    def source(self, num_tokens: int = 1000, endpoint: str = "", secret: str = "") -> KVSource:
        address = self.server.address
        return KVSource(endpoint or address.endpoint, secret or address.secret, num_tokens)

    def start(self, sink: Sink, prompt: Sequence[int] = PROMPT, cache_key: str = "", **source: Any) -> Sink:
        """Start to fetch into a sink."""
        wanted = WantedPrefix("r", chain_of(prompt, cache_key), sink.first_block, self.source(**source))
        assert self.client.may_help(wanted.source)
        self.client.fetch(wanted, sink)
        return sink

    def fetch(self, sink: Sink, *args: Any, **kwargs: Any) -> str | None:
        """Fetch into a sink; return the error."""
        return self.start(sink, *args, **kwargs).wait()

    def close(self) -> None:
        self.client.close()
        self.server.close()


@contextmanager
def pair(
    lender: Any, server_format: dict[str, str] | None = None, client_format: dict[str, str] | None = None
) -> Iterator[Pair]:
    both = Pair(lender, server_format or FORMAT, client_format or FORMAT)
    try:
        yield both
    finally:
        both.close()
