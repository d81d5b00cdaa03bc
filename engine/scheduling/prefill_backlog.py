"""PrefillBacklog: tokens that waiting and running requests must still compute before they decode.

Tokens that the prefix cache holds when a request arrives do not count. A block that several requests have in common
counts once, since the first to compute it publishes it for the others.

    prompt of A   [ cached ][ awaited ][ awaited ][ tail ]      awaited blocks are counted by hash,
    prompt of B   [ cached ][ awaited ][ awaited, not A's ]     tails, which are never shared, by length

A request costs work here when it arrives, leaves or computes a chunk of its prompt, and none while it waits or decodes.
The number is not exact if blocks are evicted while a request waits.
"""

from __future__ import annotations

from collections import Counter

from engine.kv.block_manager import BlockManager
from engine.sequence import Sequence, SequenceGroup

__all__ = ["PrefillBacklog"]


class _Part:
    """What one sequence adds to the backlog: blocks ``first`` to ``last`` of its hashes, and the tail after them."""

    __slots__ = ("end", "first", "hashes", "last", "tail")

    def __init__(self, hashes: list[int], first: int, last: int, end: int, tail: int) -> None:
        self.hashes = hashes  # the sequence's own list, which only grows
        self.first = first
        self.last = last
        self.end = end  # known tokens: these are computed before the next one is sampled
        self.tail = tail


class PrefillBacklog:
    """Follows the requests of one engine from their arrival to their first token, and through every recomputation."""

    def __init__(self, block_manager: BlockManager) -> None:
        self._blocks = block_manager
        self._awaited: Counter[int] = Counter()  # hash of a block to compute -> sequences that contain it
        self._num_tail_tokens = 0
        self._parts: dict[SequenceGroup, dict[Sequence, _Part]] = {}
        self._started: dict[SequenceGroup, None] = {}  # the running groups among them

    @property
    def num_tokens(self) -> int:
        """Tokens still to be computed, of waiting and running requests together."""
        return len(self._awaited) * self._blocks.block_size + self._num_tail_tokens

    def tokens_of(self, sequence: Sequence) -> int:
        """Return how many tokens a sequence that is not counted yet would add; at most, if blocks were evicted.

        It hashes no further than the first block that is neither cached nor awaited.
        """
        size = self._blocks.block_size
        shared = 0
        if self._shares_blocks(sequence):
            for index in range(sequence.num_tokens // size):
                block_hash = sequence.block_hash(index, size)
                if block_hash not in self._awaited and not self._blocks.prefix_cache.is_published(block_hash):
                    break
                shared += size
        return sequence.num_tokens - shared

    def add(self, group: SequenceGroup) -> None:
        """Count a request that waits because it is new or was preempted; replaces what it counted before."""
        self.remove(group)
        self._parts[group] = {one: self._counted(one) for one in group.unfinished}

    def begin(self, group: SequenceGroup) -> None:
        """Follow a waiting request that starts to run."""
        self._started[group] = None

    def advance(self) -> None:
        """Subtract the prompt tokens that a step has computed."""
        for group in list(self._started):
            parts = self._parts[group]
            for sequence, part in list(parts.items()):
                if _is_done(sequence, part):
                    self._release(parts.pop(sequence))
                elif sequence.num_computed_tokens:
                    self._compute(part, sequence.num_computed_tokens)
            if not parts:
                del self._parts[group], self._started[group]

    def end(self, sequence: Sequence) -> None:
        """Subtract one sequence of a request, which was ended from outside."""
        part = self._parts.get(sequence.group, {}).pop(sequence, None)
        if part is not None:
            self._release(part)

    def remove(self, group: SequenceGroup) -> None:
        """Subtract a request that has ended or is counted anew."""
        for part in self._parts.pop(group, {}).values():
            self._release(part)
        self._started.pop(group, None)

    def _shares_blocks(self, sequence: Sequence) -> bool:
        return self._blocks.enable_prefix_caching and not sequence.group.wants_prompt_logprobs

    def _counted(self, sequence: Sequence) -> _Part:
        """Add a sequence; a swapped one computes no block again."""
        size, end = self._blocks.block_size, sequence.num_tokens
        first = last = 0
        if self._shares_blocks(sequence) and not sequence.host_table:
            last = end // size
            if last:
                sequence.block_hash(last - 1, size)  # and all hashes before it
            while first < last and self._blocks.prefix_cache.is_published(sequence.block_hashes[first]):
                first += 1
            self._awaited.update(sequence.block_hashes[first:last])
        tail = end - max(sequence.num_computed_tokens, last * size)
        self._num_tail_tokens += tail
        return _Part(sequence.block_hashes, first, last, end, tail)

    def _compute(self, part: _Part, num_computed: int) -> None:
        """Subtract what was computed: its blocks are published, so they no longer count for other requests either."""
        size = self._blocks.block_size
        done = min(num_computed // size, part.last)
        for block_hash in part.hashes[part.first : done]:
            self._awaited.pop(block_hash, None)
        part.first = max(part.first, done)
        tail = max(0, part.end - max(num_computed, part.last * size))
        self._num_tail_tokens += tail - part.tail
        part.tail = tail

    def _release(self, part: _Part) -> None:
        """Subtract what is left of a sequence; blocks that others contain too count until one is published."""
        awaited = self._awaited
        for block_hash in part.hashes[part.first : part.last]:
            count = awaited.get(block_hash, 0)  # 0 if another sequence has computed it meanwhile
            if count > 1 and not self._blocks.prefix_cache.is_published(block_hash):
                awaited[block_hash] = count - 1
            elif count:
                del awaited[block_hash]
        self._num_tail_tokens -= part.tail


def _is_done(sequence: Sequence, part: _Part) -> bool:
    """Whether a sequence that ran has its next token, or gets none: it has ended, or its beam was not continued."""
    if sequence.num_tokens > part.end or sequence.is_finished:
        return True
    return sequence not in sequence.group.sequences
