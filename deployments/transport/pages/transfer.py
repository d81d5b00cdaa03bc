"""PageTransfer: lets one replica's engine give pages to other replicas, and take theirs.

The names of pages cover the content of all weights, which may take seconds to read. So a thread of its own reads them
after the replica has started; until then connections wait, and the engine computes what it lacks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from deployments.transport.pages.address import PageAddress
from deployments.transport.pages.client import PageClient
from deployments.transport.pages.server import PageServer
from deployments.transport.pages.transfer_log import Transfer
from engine.async_engine import AsyncEngine
from engine.config import EngineInfo
from engine.kv.tiers.copies import CopyOrder
from engine.kv.tiers.departures import Lease
from engine.kv.tiers.digests import TokenChain
from engine.kv.tiers.page_format import FORMAT_VERSION, PageFormat
from engine.kv.tiers.tiers import Tiers
from engine.observability.metrics import MetricSink

__all__ = ["EngineLender", "PageTransfer", "described"]

logger = logging.getLogger("ray.serve")


class PageTransfer:
    """The page server and the page client of one engine.

    Args:
        engine: drives the engine.
        tiers: of the engine.
        host: the node's own address, to which the server binds.
        metrics: records ended connections.

    Attributes:
        client: the engine's source of pages; None until the weights are read.

    Raises:
        ConfigError: ``host`` is not an address of this node.
    """

    def __init__(self, engine: AsyncEngine, tiers: Tiers, host: str, metrics: MetricSink) -> None:
        self._tiers = tiers
        self._info = engine.info
        self._server = PageServer(EngineLender(tiers), host, max_tokens=engine.info.max_model_len, metrics=metrics)
        self.client: PageClient | None = None
        self._thread = threading.Thread(target=self._open, name="page-format", daemon=True)
        self._thread.start()

    @property
    def address(self) -> PageAddress:
        """Of the server, for the replica's metadata."""
        return self._server.address

    def recent(self) -> tuple[Transfer, ...]:
        """Return what is read from other replicas now, and was in the last minute. Any thread may call it."""
        return () if self.client is None else self.client.log.recent()

    def wait_until_open(self) -> None:
        """Wait until pages can be sent and received."""
        self._thread.join()

    def copy(self, order: CopyOrder) -> None:
        """Read the KV of a text from another replica when there is time and room. Any thread may call it.

        A text that no request of this model can have is ignored.
        """
        token_ids, info = order.token_ids, self._info
        if 0 < len(token_ids) <= info.max_model_len and 0 <= min(token_ids) <= max(token_ids) < info.vocab_size:
            self._tiers.inbox.post(lambda: self._tiers.copies.add(order))

    def drain(self, quiet_s: float, within_s: float) -> None:
        """Wait for what other replicas read: see ``PageServer.drain``. The engine must still run."""
        self._server.drain(quiet_s, within_s)

    def close(self) -> None:
        """End every transfer. The engine must have been shut down, so that it starts no further one."""
        self._thread.join()
        if self.client is not None:
            self.client.close()
        self._server.close()

    def _open(self) -> None:
        try:
            page_format = self._tiers.format
        except Exception:
            logger.exception("the weights could not be read again; this replica exchanges no KV pages")
            return
        description = described(page_format, self._info)
        client = self.client = PageClient(description, _bytes_per_token(page_format), page_format.block_size)
        self._server.open(description)
        self._tiers.inbox.post(partial(self._tiers.add_peers, client))


class EngineLender:
    """Lends the pages that an engine's memory holds: a PageLender.

    Args:
        tiers: of the engine, whose thread makes the leases.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers

    @property
    def block_bytes(self) -> int:
        """Bytes of all pages of a block."""
        return sum(kind.num_bytes for kind in self._tiers.format.kinds)

    def chain(self, token_ids: Sequence[int], cache_key: str) -> TokenChain:
        """Return the blocks of a text, as the engine names them."""
        return self._tiers.chain(list(token_ids), cache_key)

    def lend(
        self,
        chain: TokenChain,
        first_block: int,
        num_blocks: int,
        on_ready: Callable[[Lease | None], None],
        *,
        timeout_s: float,
    ) -> None:
        """Lease blocks of a text before the engine's next step, which may have to copy them: see ``PageLender``."""

        def lease() -> None:
            departures = self._tiers.departures
            self._tiers.publish_running()  # a part of an answer may be wanted while it is generated
            if departures.lease(chain, first_block, num_blocks, on_ready, timeout_s=timeout_s) is None:
                on_ready(None)

        self._tiers.inbox.post(lease)

    def record(self, num_tokens: int, num_bytes: int) -> None:
        """Count what was sent."""
        self._tiers.inbox.post(lambda: self._tiers.meter.saved("peer", num_tokens=num_tokens, num_bytes=num_bytes))


def described(page_format: PageFormat, info: EngineInfo) -> dict[str, str]:
    """Return what must be equal for two engines to exchange pages, by the names that a refusal gives."""
    sizes = ", ".join(f"{kind.name}: {kind.num_bytes} bytes" for kind in page_format.kinds)
    return {
        "dtype": info.dtype,
        "kv_cache_dtype": info.kv_cache_dtype,
        "block_size": str(page_format.block_size),
        "pages": sizes,
        "tensor_parallel_size": str(page_format.num_ranks),
        "model": page_format.model_digest.hex(),
        "format": str(FORMAT_VERSION),
    }


def _bytes_per_token(page_format: PageFormat) -> float:
    return sum(kind.num_bytes for kind in page_format.kinds) / page_format.block_size
