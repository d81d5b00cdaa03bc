"""StateIndex: after which blocks a prefix hit may resume, on replicas whose model has states.

A recurrent layer can continue a cached prefix only after a block with a snapshot of its states. So of the cached blocks
of a prompt, those after the last one with a state are computed again. The engine's rule is in
``BlockManager.match_prefix``: the last token is always computed, so a block that ends with it is never enough.

It knows a replica only if its events have said that its model has states. It takes no lock: the caller holds that of
RoutingState.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["StateIndex"]


class StateIndex:
    """Maps block hashes to the replicas on which a hit may resume after the block."""

    def __init__(self) -> None:
        self._by_replica: dict[str, set[int]] = {}
        self._replicas_of: dict[int, set[str]] = {}

    def __bool__(self) -> bool:
        """Whether any replica's model has states."""
        return bool(self._by_replica)

    def stored(self, replica: str, hashes: Iterable[int]) -> None:
        """Record that a hit may resume after these blocks."""
        held = self._by_replica.setdefault(replica, set())
        for block in hashes:
            held.add(block)
            self._replicas_of.setdefault(block, set()).add(replica)

    def removed(self, replica: str, hashes: Iterable[int]) -> None:
        """Record that a hit may no longer resume after these blocks."""
        held = self._by_replica.setdefault(replica, set())
        for block in hashes:
            if block not in held:
                continue
            held.remove(block)
            replicas = self._replicas_of[block]
            replicas.remove(replica)
            if not replicas:
                del self._replicas_of[block]

    def cleared(self, replica: str) -> None:
        """Record that no state is left; what is known of the replica's model stays."""
        if replica in self._by_replica:
            self.removed(replica, tuple(self._by_replica[replica]))

    def remove_replica(self, replica: str) -> None:
        """Forget a replica."""
        self.cleared(replica)
        self._by_replica.pop(replica, None)

    def states(self, replica: str) -> frozenset[int] | None:
        """Return the blocks after which a hit may resume; None: the model has no states, as far as is known."""
        held = self._by_replica.get(replica)
        return None if held is None else frozenset(held)

    def resumable(
        self,
        hashes: Sequence[int],
        num_cached_blocks: Mapping[str, int],
        max_blocks: int,
        is_assumed: Callable[[str, int], bool],
    ) -> dict[str, int]:
        """Return how many leading blocks of a prompt need not be computed; replicas that save none are absent.

        Args:
            hashes: of the prompt's full blocks, in order.
            num_cached_blocks: how many of them each replica has cached.
            max_blocks: blocks that end before the prompt's last token.
            is_assumed: whether no event has reported a block of a replica, which is then taken to have a state: one
                comes with the block where a prompt ends, and without events it is not known.
        """
        saved: dict[str, int] = {}
        searched: dict[str, int] = {}
        for name, cached in num_cached_blocks.items():
            if name not in self._by_replica:
                saved[name] = cached
            elif num_blocks := min(cached, max_blocks):
                (saved if is_assumed(name, hashes[num_blocks - 1]) else searched)[name] = num_blocks
        # One walk for all replicas, from the end of the longest hit to the first block at which the last one resumes.
        replicas_of = self._replicas_of.get
        for num_blocks in range(max(searched.values(), default=0), 0, -1):
            if (replicas := replicas_of(hashes[num_blocks - 1])) is None:
                continue
            for name in searched.keys() & replicas:
                if searched[name] >= num_blocks:
                    saved[name] = num_blocks
                    del searched[name]
            if not searched:
                break
        return saved
