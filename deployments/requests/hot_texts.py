"""HotTexts: lets replicas copy the KV of the latest prompts when a replica leaves or joins.

    a replica leaves   the prompts that it has computed and no other holds: each to the neighbour that lacks the least
    a replica joins    the prefixes that several of the latest prompts share, from a replica that holds them

What is copied is bounded by the blocks that the copying replica lacks. The replicas read them from each other when they
have time (engine/kv/tiers/copies.py), and a replica that leaves serves its pages until nothing was read for a moment.
An ingress knows its own requests only; equal prompts of several ingresses go to the same neighbour.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.routing.cluster_view import ClusterView
from deployments.transport.pages.address import PageAddress
from deployments.transport.request_channel.dispatch import Dispatch
from engine.kv.tiers.copies import CopyOrder
from engine.request import KVSource

__all__ = ["HotTexts"]

MAX_KEPT_TOKENS = 2**17  # of prompts that are remembered: about 5 MB
MAX_COPIED_TOKENS = 2**16  # when one replica leaves or joins


@dataclass(slots=True)
class _Text:
    """A prompt that was sent lately, and those before it that are its beginning: the turns of a conversation."""

    token_ids: Sequence[int]
    cache_key: str
    hashes: Sequence[int]
    replica: str  # that has computed it last
    num_ends: Counter[int]  # last block -> prompts


class _Budget:
    """The tokens that may still be copied. A block that was ordered already costs nothing."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_tokens = MAX_COPIED_TOKENS
        self._ordered: set[tuple[str, int]] = set()

    def missing(self, replica: str, hashes: Sequence[int]) -> list[int]:
        """Return the blocks that were not ordered for a replica."""
        return [block for block in hashes if (replica, block) not in self._ordered]

    def take(self, replica: str, blocks: Sequence[int]) -> bool:
        """Order missing blocks; False if they are too many."""
        self._num_tokens -= len(blocks) * self._block_size
        self._ordered |= {(replica, block) for block in blocks}
        return self._num_tokens >= 0


class HotTexts:
    """The latest prompts of one ingress. Use it on one event loop.

    Args:
        view: knows what each replica holds.
        send: sends a replica the order to copy a text.
    """

    def __init__(self, view: ClusterView, send: Callable[[str, CopyOrder], None]) -> None:
        self._view = view
        self._send = send
        self._texts: OrderedDict[int, _Text] = OrderedDict()  # by the hash of the last block; the latest last
        self._num_tokens = 0

    def sent(self, dispatch: Dispatch, *, is_repeat: bool = False) -> None:
        """Remember a prompt that was sent to a replica.

        Args:
            dispatch: of the prompt.
            is_repeat: another replica has returned it before.
        """
        hashes, request = dispatch.block_hashes, dispatch.request
        if not hashes or request.output_token_ids or len(request.prompt_token_ids) > MAX_COPIED_TOKENS:
            return
        num_ends = self._remove_beginnings(hashes)
        if not is_repeat or hashes[-1] not in num_ends:
            num_ends[hashes[-1]] += 1
        self._num_tokens += len(request.prompt_token_ids)
        self._texts[hashes[-1]] = _Text(request.prompt_token_ids, request.cache_key, hashes, dispatch.replica, num_ends)
        while self._num_tokens > MAX_KEPT_TOKENS:
            _, oldest = self._texts.popitem(last=False)
            self._num_tokens -= len(oldest.token_ids)

    def _remove_beginnings(self, hashes: Sequence[int]) -> Counter[int]:
        """Remove the texts that are the beginning of another one, or equal to it; return how often each was used."""
        num_ends: Counter[int] = Counter()
        for block in hashes:
            if (known := self._texts.pop(block, None)) is not None:
                self._num_tokens -= len(known.token_ids)
                num_ends += known.num_ends
        return num_ends

    def replica_left(self, name: str, metadata: Mapping[str, Any], candidates: Collection[str]) -> None:
        """Let the neighbours copy what only a replica holds that takes no more requests.

        Args:
            name: of the replica.
            metadata: as it reported it.
            candidates: replicas that take orders.
        """
        address = PageAddress.from_metadata(metadata)
        if address is None or not candidates:
            return
        budget = _Budget(self._view.routing.block_size)
        for text in reversed(self._texts.values()):
            if text.replica != name:
                continue
            taker = self._view.most_similar(text.hashes, candidates)
            if taker is None or not (missing := budget.missing(taker.name, text.hashes[taker.num_blocks :])):
                continue
            if not budget.take(taker.name, missing):
                break
            source = KVSource(address.endpoint, address.secret, len(text.token_ids))
            text.replica = taker.name
            self._send(taker.name, CopyOrder(text.token_ids, text.cache_key, source, "drain"))

    def replica_joined(self, name: str) -> None:
        """Let a new replica copy the prefixes that several of the latest prompts share, the most used first."""
        block_size = self._view.routing.block_size
        budget = _Budget(block_size)
        for text, num_blocks in self._shared_prefixes():
            hashes = text.hashes[:num_blocks]
            if not (missing := budget.missing(name, hashes)):
                continue
            if (source := self._view.source_of(hashes, without=name)) is None:
                continue
            if not budget.take(name, missing):
                break
            # The token after the prefix belongs to it: a text's last token is computed in any case.
            token_ids = text.token_ids[: num_blocks * block_size + 1]
            self._send(name, CopyOrder(token_ids, text.cache_key, source, "warm_up"))

    def _shared_prefixes(self) -> Iterator[tuple[_Text, int]]:
        """Yield (text, leading blocks) of each prefix that was used several times, the most used ones first."""
        uses: Counter[int] = Counter()
        for text in self._texts.values():
            num_uses = 0
            for block in reversed(text.hashes):
                num_uses += text.num_ends[block]
                uses[block] += num_uses
        prefixes: dict[int, tuple[_Text, int]] = {}
        for text in self._texts.values():
            depth = sum(uses[block] > 1 for block in text.hashes)  # a prefix: what follows is used no more often
            if depth:
                prefixes[text.hashes[depth - 1]] = text, depth
        for block in sorted(prefixes, key=uses.__getitem__, reverse=True):
            yield prefixes[block]
