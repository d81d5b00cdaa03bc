"""SourceFinder: from where the replicas can fetch the beginning of a prompt: storage, and peers that serve pages.

Only what a peer's events have reported is counted: a block that is assumed to be there may still have to be computed.
A replica that drains serves pages until it ends. One that has ended or just failed the request, or whose reports have
expired, is no source. Peers' disks are not read.

A stream that moves to another replica has lost its batch there, so what can be fetched for it is fetched even if no
rate of a peer is known. A replica that has handed it over holds all of it, whether its events have arrived or not.

It takes no lock: the caller holds that of RoutingState.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import xxhash

from deployments.routing.cost import Holder, PromptBlocks
from deployments.routing.fetches import Sources
from deployments.routing.held_blocks import HeldBlocks
from deployments.routing.state import RoutingState
from deployments.transport.pages.address import PageAddress
from deployments.transport.request_channel.dispatch import Dispatch
from engine.request import EngineRequest, KVSource

__all__ = ["CopyTarget", "Holding", "SourceFinder"]

_MAX_HOLDERS = 3  # that are compared
_MAX_TRIED = 8
_SIMILAR_BLOCKS = 8  # of a text that replicas hold: about as many are copied at a time
_GUESS_EVERY = 16  # requests, so that not all ingresses guess at once


class CopyTarget(NamedTuple):
    """A replica that is to copy the KV of an answer from the one that computes it."""

    replica: str
    num_held_tokens: int  # of the prompt and the answer, from the first one, that it has reported to hold
    source: KVSource  # the one that computes the answer


class Holding(NamedTuple):
    """A replica, and how many leading blocks of a text it has reported to hold."""

    name: str
    num_blocks: int


class SourceFinder:
    """Finds the sources of prompts.

    Args:
        routing: the replicas' caches and loads.
    """

    def __init__(self, routing: RoutingState) -> None:
        self._routing = routing
        self._addresses: dict[str, PageAddress] = {}

    def set_replicas(self, metadata: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the set of replicas that run: name -> the metadata that the replica reported."""
        addresses = {name: PageAddress.from_metadata(described) for name, described in metadata.items()}
        self._addresses = {name: address for name, address in addresses.items() if address is not None}

    def find(
        self,
        prompt: PromptBlocks,
        num_cached_blocks: HeldBlocks | Mapping[str, int],
        request: EngineRequest,
        avoid: Collection[str],
        is_lost: Callable[[str], bool],
        handed_over_by: str,
        now: float,
    ) -> Sources | None:
        """Return the sources of a prompt; None if there are none.

        Args:
            prompt: the prompt, and what was generated after it.
            num_cached_blocks: how many leading blocks of it each replica need not compute; absent means none.
            request: its request.
            avoid: replicas that have just failed the request.
            is_lost: whether a replica has ended.
            handed_over_by: the replica that has ended the request so that another one continues it; empty: none.
            now: monotonic seconds.
        """
        rates = self._routing.table.rates
        has_states = bool(self._routing.states)
        # After which blocks on storage a model with states could resume, its events do not say.
        stored = {
            name: held
            for name, index in self._routing.storage.items()
            if index and not has_states and (held := index.num_held_blocks(prompt.hashes, num_cached_blocks))
        }
        holders = (
            self._holders(prompt, num_cached_blocks, avoid, is_lost, is_whole=has_states) if self._addresses else []
        )
        if handed_over_by and (address := self._address_of(handed_over_by, is_lost)) is not None:
            holders = [holder for holder in holders if holder.name != handed_over_by]
            holders.insert(0, Holder(handed_over_by, address.endpoint, address.secret, len(prompt.hashes)))
        if not holders and not stored:
            return None
        return Sources(
            rates,
            holders,
            takers=self._addresses,
            stored=stored,
            are_divisible=not has_states,
            guesses=bool(handed_over_by or request.output_token_ids)
            or (rates.may_guess(now) and _is_one_in(_GUESS_EVERY, request.request_id)),
        )

    def copy_target(
        self,
        dispatch: Dispatch,
        hashes: Sequence[int],
        candidates: Collection[str],
        block_size: int,
    ) -> CopyTarget | None:
        """Return which other replica is to copy the KV of a running answer: see ``ClusterView.copy_target``.

        It is the one that holds the most of it. Replicas that lack hardly more are as good: the answer's id chooses one
        of them, so that not all answers to one shared prompt are copied to the same replica.
        """
        if (address := self._addresses.get(dispatch.replica)) is None:
            return None
        answer = xxhash.xxh64_intdigest(dispatch.request.request_id.encode(errors="replace"))
        others = [name for name in candidates if name != dispatch.replica]
        if (holding := self._most_similar(hashes, others, answer)) is None:
            return None
        source = KVSource(address.endpoint, address.secret, len(hashes) * block_size)
        return CopyTarget(holding.name, holding.num_blocks * block_size, source)

    def most_similar(self, hashes: Sequence[int], candidates: Collection[str]) -> Holding | None:
        """Return the candidate that holds the most of a text: see ``ClusterView.most_similar``."""
        return self._most_similar(hashes, candidates, hashes[-1])

    def _most_similar(self, hashes: Sequence[int], candidates: Collection[str], text: int) -> Holding | None:
        """Return the candidate that holds the most of a text; of those that hold hardly less, ``text`` chooses one."""
        replicas, index = self._routing.table.by_name, self._routing.index
        cached = index.num_cached_blocks(hashes)
        held = {
            name: index.num_confirmed_blocks(name, hashes, cached.get(name, 0))
            for name in candidates
            if name in self._addresses and not replicas[name].ranks_last
        }
        if not held:
            return None
        least = max(held.values()) - _SIMILAR_BLOCKS
        name = max((name for name in held if held[name] >= least), key=lambda name: text ^ replicas[name].seed)
        return Holding(name, held[name])

    def source_of(self, hashes: Sequence[int], without: str, block_size: int) -> KVSource | None:
        """Return from where all blocks of a text can be read: see ``ClusterView.source_of``."""
        index, replicas = self._routing.index, self._routing.table.by_name
        for name, num_blocks in index.num_cached_blocks(hashes).items():
            address = None if name == without or replicas[name].ranks_last else self._addresses.get(name)
            if address is not None and index.num_confirmed_blocks(name, hashes, num_blocks) == len(hashes):
                return KVSource(address.endpoint, address.secret, len(hashes) * block_size)
        return None

    def _address_of(self, name: str, is_lost: Callable[[str], bool]) -> PageAddress | None:
        """Return where a replica serves its pages; None if it does not, or may have ended."""
        address = self._addresses.get(name)
        if address is None or is_lost(name) or self._routing.table.by_name[name].ranks_last:
            return None
        return address

    def _holders(
        self,
        prompt: PromptBlocks,
        num_cached_blocks: HeldBlocks | Mapping[str, int],
        avoid: Collection[str],
        is_lost: Callable[[str], bool],
        *,
        is_whole: bool,
    ) -> list[Holder]:
        """Return the replicas that hold the most of a prompt, those that hold more first.

        Args:
            is_whole: a part of what a replica holds is worth nothing.
        """
        holders: list[Holder] = []
        for name, held in islice(_deepest_first(num_cached_blocks), _MAX_TRIED + len(avoid)):
            address = self._address_of(name, is_lost)
            if address is None or name in avoid:
                continue
            confirmed = self._routing.index.num_confirmed_blocks(name, prompt.hashes, held)
            if confirmed and (confirmed == held or not is_whole):
                holders.append(Holder(name, address.endpoint, address.secret, confirmed))
                if len(holders) == _MAX_HOLDERS:
                    break
        return holders


def _deepest_first(num_cached_blocks: HeldBlocks | Mapping[str, int]) -> Iterable[tuple[str, int]]:
    """Return the replicas and their blocks, those with the most first."""
    if isinstance(num_cached_blocks, HeldBlocks):
        return num_cached_blocks.deepest()
    return sorted(num_cached_blocks.items(), key=lambda item: item[1], reverse=True)


def _is_one_in(number: int, request_id: str) -> bool:
    return xxhash.xxh64_intdigest(request_id.encode(errors="replace")) % number == 0
