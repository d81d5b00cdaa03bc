"""The interface of what KV pages are fetched from: a disk, or another engine.

The engine's thread asks a source for blocks of a prompt. The source answers from a thread of its own: it fills the
reserved host pages of one block after the other, in order, and says with which checksums it got them:

    engine's thread    fetch(wanted, sink) ... goes on with its steps ... publishes what has come, queues the request
    source's thread      for each block: buffers = sink.page_buffers(index)
                                         fill every buffer that is not None
                                         sink.block_done(index, checksums)
                         sink.finished(None)        exactly once, whatever happens, after the last write to a buffer

A source need not be trusted: what is not complete and verified when the request's deadline has passed is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.kv.tiers.digests import TokenChain
from engine.observability.load import SourceRate
from engine.request import KVSource

__all__ = ["FETCH_ERRORS", "ArrivalSink", "PrefixSource", "WantedPrefix", "begin_fetch"]

# Why a fetch ends early: bytes that are not what they were; an error of the disk or the network; the source has lost
# blocks; it refuses, since its pages are others; it takes too long; no one waits any longer.
FETCH_ERRORS = ("checksum", "io", "gone", "refused", "late", "cancelled")


@dataclass(frozen=True, slots=True)
class WantedPrefix:
    """Blocks of a prompt that memory lacks.

    Attributes:
        request_id: of the request that waits for them.
        chain: the tokens, hashes and digests of the prompt.
        first_block: blocks before it are in memory, with all that a later prompt needs of them.
        source: another engine that the router has named for this request.
    """

    request_id: str
    chain: TokenChain
    first_block: int
    source: KVSource | None = None


class ArrivalSink(Protocol):
    """Where a source puts what it has read. Any thread may call it, but only one at a time."""

    @property
    def first_block(self) -> int:
        """Index, in the prompt, of the first block that is wanted."""

    @property
    def num_blocks(self) -> int:
        """Blocks that are wanted: at most those that the source has, and fewer if host memory is short."""

    @property
    def is_cancelled(self) -> bool:
        """Whether no one waits any longer: the source should stop, and call ``finished``."""

    def page_buffers(self, index: int) -> list[memoryview | None]:
        """Return the memory for each kind of page of block ``index`` of the prompt; None: that kind is not wanted."""

    def block_done(self, index: int, checksums: Sequence[int | None]) -> bool:
        """Verify a block whose buffers are filled; blocks come in order.

        Args:
            index: of the block in the prompt.
            checksums: ``page_format.checksum`` of each kind's page where it was read first; None: it did not come.

        Returns:
            Whether the bytes are right. If not, no later block counts: the source should stop.
        """

    def finished(self, error: str | None) -> None:
        """Say that nothing more is written to the buffers. Call it exactly once.

        Args:
            error: why not all blocks have come, one of ``FETCH_ERRORS``, the label of a metric. None: all have come.
        """


class PrefixSource(Protocol):
    """A source of KV pages. The engine's thread calls it; no call may wait for anything."""

    @property
    def name(self) -> str:
        """Label of metrics: ``disk``, ``shared`` or ``peer``."""

    def may_help(self, source: KVSource | None) -> bool:
        """Whether the source may have anything at all, before a prompt is matched.

        Args:
            source: another engine that the router has named for the request.
        """

    def has(self, wanted: WantedPrefix, index: int, kind: int) -> bool:
        """Whether the source is expected to have the page of a kind that belongs to block ``index`` of the prompt."""

    def seconds(self, num_tokens: int) -> float | None:
        """Return how long it is expected to take to fetch this many tokens; None: nothing was measured lately."""

    def rates(self) -> Sequence[SourceRate]:
        """Return how fast pages have come from here lately, for load reports. Called after each step: it is cheap."""

    def fetch(self, wanted: WantedPrefix, sink: ArrivalSink) -> None:
        """Begin to fill ``sink``. The source must call ``sink.finished``, also if it fails."""


def begin_fetch(source: PrefixSource, wanted: WantedPrefix, sink: ArrivalSink) -> None:
    """Let a source fill a sink, unless no one waits for it any longer."""
    if sink.is_cancelled:
        sink.finished("cancelled")
    else:
        source.fetch(wanted, sink)
