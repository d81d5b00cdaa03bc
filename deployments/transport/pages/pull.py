"""pull: receives the pages of some blocks over an open connection, and verifies each block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final

from deployments.transport.pages.messages import (
    MAX_REPLY_BYTES,
    Blocks,
    End,
    PageMessageError,
    Pull,
    decode_from_server,
)
from deployments.transport.pages.wire import Wire
from engine.errors import PagodaError
from engine.kv.prefix_hash import pack_tokens
from engine.kv.tiers.source import ArrivalSink, WantedPrefix

__all__ = ["ChecksumError", "PullCancelledError", "Pulled", "pull"]

MAX_PAGE_BYTES: Final = 2**28


class PullCancelledError(PagodaError):
    """No one waits for the blocks any longer."""


class ChecksumError(PagodaError):
    """The bytes of a block are not those that its source had."""


@dataclass(slots=True)
class Pulled:
    """What one Pull has given so far.

    Attributes:
        reason: why the source has ended it; empty: it has sent all that it has.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    latency_s: float = 0.0  # from the request to the first message of the answer
    transfer_s: float = 0.0  # from there to the last
    reason: str = ""


def pull(wire: Wire, wanted: WantedPrefix, sink: ArrivalSink, deadline: float, pulled: Pulled) -> None:
    """Ask for the blocks that a sink has pages for, and receive them in their order.

    Args:
        wire: of an open conversation; unless this returns normally, it can only be closed.
        wanted: the prompt.
        sink: has the pages that are written, and verifies each block.
        deadline: time of ``monotonic`` at which this gives up.
        pulled: is filled in.

    Raises:
        OSError: as Wire.
        PageMessageError: the answer is malformed, or its pages have other sizes.
        ChecksumError: a block has changed on the way.
        PullCancelledError: the sink is cancelled.
    """
    started = monotonic()
    wire.send(_request(wanted, sink, deadline - started), deadline)
    answer = decode_from_server(wire.receive(MAX_REPLY_BYTES, deadline))
    answered = monotonic()
    pulled.latency_s = answered - started
    while isinstance(answer, Blocks):
        _receive(wire, answer, sink, deadline, pulled)
        pulled.transfer_s = monotonic() - answered
        answer = decode_from_server(wire.receive(MAX_REPLY_BYTES, deadline))
    if not isinstance(answer, End):
        raise PageMessageError(f"{type(answer).__name__} does not answer a Pull")
    pulled.reason = answer.reason


def _request(wanted: WantedPrefix, sink: ArrivalSink, timeout_s: float) -> Pull:
    chain, end = wanted.chain, sink.first_block + sink.num_blocks
    tokens = pack_tokens(chain.token_ids[: end * chain.block_size])
    return Pull(tokens, chain.cache_key, sink.first_block, sink.num_blocks, max(0, int(timeout_s * 1000)))


def _receive(wire: Wire, blocks: Blocks, sink: ArrivalSink, deadline: float, pulled: Pulled) -> None:
    """Receive the pages of one message into the sink."""
    if sink.is_cancelled:
        raise PullCancelledError
    first, count = sink.first_block + pulled.num_blocks, len(blocks.sizes)
    if blocks.first_block != first or not 0 < count <= sink.num_blocks - pulled.num_blocks:
        raise PageMessageError(f"blocks {blocks.first_block} to {blocks.first_block + count - 1} were not asked for")
    if len(blocks.checksums) != count:
        raise PageMessageError(f"{len(blocks.checksums)} checksums of {count} blocks")
    parts = list(zip(blocks.sizes, blocks.checksums, strict=True))
    buffers = [buffer for index, part in enumerate(parts, first) for buffer in _buffers(sink, index, *part)]
    wire.receive_into(buffers, deadline)
    for index, (sizes, checksums) in enumerate(parts, first):
        if not sink.block_done(index, checksums):
            raise ChecksumError(f"block {index} has changed on the way")
        pulled.num_blocks += 1
        pulled.num_bytes += sum(sizes)


def _buffers(
    sink: ArrivalSink, index: int, sizes: Sequence[int], checksums: Sequence[int | None]
) -> Iterator[memoryview]:
    """Yield the memory for the parts of a block that are sent: pages of the sink, or where it wants none, others."""
    pages = sink.page_buffers(index)
    if not len(pages) == len(sizes) == len(checksums):
        raise PageMessageError(f"block {index} has {len(sizes)} kinds of pages, not {len(pages)}")
    for page, size, checksum in zip(pages, sizes, checksums, strict=True):
        expected = 0 if checksum is None else size if page is None else len(page)
        if size != expected or size > MAX_PAGE_BYTES:
            raise PageMessageError(f"a page of block {index} has {size} bytes, not {min(expected, MAX_PAGE_BYTES)}")
        if size:
            yield memoryview(bytearray(size)) if page is None else page
