"""PrefillBacklog: tokens that waiting and running requests must still compute before they decode.

Tokens that the prefix cache holds when a request arrives do not count. A block that several requests have in common
counts once, because the first request that computes it publishes it for the others.

    prompt of A   [ cached ][ awaited ][ awaited ][ tail ]      awaited blocks are counted by hash,
    prompt of B   [ cached ][ awaited ][ awaited, not A's ]     tails, which are never shared, by length

``add_group`` counts the awaited blocks and the tail of each sequence. While a started group computes its prompt,
``advance`` moves the end of its cached part to the right and shortens its tail. ``remove_sequence`` and
``remove_group`` subtract what is left. Nothing runs for requests that wait or decode.

The number is not exact if blocks are evicted while a request waits.
"""

from __future__ import annotations

from collections import Counter

from engine.kv.block_manager import BlockManager
from engine.sequence import Sequence, SequenceGroup

__all__ = ["PrefillBacklog"]


class _SequenceBacklog:
    """What one sequence adds to the backlog: the awaited blocks ``first`` to ``last`` (excluded), and the tail."""

    __slots__ = ("end", "first", "hashes", "last", "tail")

    def __init__(self, hashes: list[int], first: int, last: int, end: int, tail: int) -> None:
        self.hashes = hashes  # block hashes: the sequence's own list, which only grows
        self.first = first
        self.last = last
        self.end = end  # number of known tokens, all of which are computed before the next one is sampled
        self.tail = tail  # tokens after the last full block that are not computed yet


class PrefillBacklog:
    """Follows the requests of one engine from their arrival to their first token, and through every recomputation.

    Attributes:
        num_sequences: sequences that are followed.
        num_context_tokens: known tokens of theirs, cached and computed ones included.
    """

    def __init__(self, block_manager: BlockManager) -> None:
        self._blocks = block_manager
        self._awaited: Counter[int] = Counter()  # hash of a block to compute -> sequences that contain it
        self._num_tail_tokens = 0
        self.num_sequences = self.num_context_tokens = 0
        self._backlogs: dict[SequenceGroup, dict[Sequence, _SequenceBacklog]] = {}
        self._started: dict[SequenceGroup, None] = {}  # the running groups among them; an ordered set

    @property
    def num_tokens(self) -> int:
        """Tokens still to be computed, of waiting and running requests together."""
        return len(self._awaited) * self._blocks.block_size + self._num_tail_tokens

    def tokens_of(self, sequence: Sequence) -> int:
        """Return how many tokens a sequence that is not counted yet would add, or an upper bound.

        It hashes no further than the first block that is neither cached nor awaited. After evictions, later blocks may
        still be cached: then the result is an upper bound.
        """
        size = self._blocks.block_size
        shared = 0
        if self._shares_blocks(sequence):
            for index in range(sequence.num_tokens // size):
                block_hash = sequence.block_hash(index, size)
                if block_hash not in self._awaited and not self._blocks.prefix_cache.is_cached(block_hash):
                    break
                shared += size
        return sequence.num_tokens - shared

    def add_group(self, group: SequenceGroup) -> None:
        """Count a waiting request, which is new or was preempted; what it counted before is replaced."""
        self.remove_group(group)
        self._backlogs[group] = {member: self._count(member) for member in group.unfinished}

    def start_group(self, group: SequenceGroup) -> None:
        """Follow the prefill of a request that starts to run."""
        self._started[group] = None

    def advance(self) -> None:
        """Subtract the prompt tokens that a step has computed."""
        for group in list(self._started):
            backlogs = self._backlogs[group]
            for sequence, backlog in list(backlogs.items()):
                if _is_done(sequence, backlog):
                    self._subtract_rest(backlogs.pop(sequence))
                elif sequence.num_computed_tokens:
                    self._subtract_computed(backlog, sequence.num_computed_tokens)
            if not backlogs:
                del self._backlogs[group], self._started[group]

    def remove_sequence(self, sequence: Sequence) -> None:
        """Subtract one sequence of a request, which was ended between two steps."""
        backlog = self._backlogs.get(sequence.group, {}).pop(sequence, None)
        if backlog is not None:
            self._subtract_rest(backlog)

    def remove_group(self, group: SequenceGroup) -> None:
        """Subtract a request that has ended or is counted again."""
        for backlog in self._backlogs.pop(group, {}).values():
            self._subtract_rest(backlog)
        self._started.pop(group, None)

    def _shares_blocks(self, sequence: Sequence) -> bool:
        return self._blocks.enable_prefix_caching and not sequence.group.wants_prompt_logprobs

    def _count(self, sequence: Sequence) -> _SequenceBacklog:
        """Count one sequence. A swapped one has no awaited blocks: it computes none of its blocks again."""
        size, end = self._blocks.block_size, sequence.num_tokens
        first = last = 0
        if self._shares_blocks(sequence) and not sequence.host_table:
            last = end // size
            if last:
                sequence.block_hash(last - 1, size)  # and all hashes before it
            while first < last and self._blocks.prefix_cache.is_cached(sequence.block_hashes[first]):
                first += 1
            self._awaited.update(sequence.block_hashes[first:last])
        tail = end - max(sequence.num_computed_tokens, last * size)
        self._num_tail_tokens += tail
        self.num_sequences += 1
        self.num_context_tokens += end
        return _SequenceBacklog(sequence.block_hashes, first, last, end, tail)

    def _subtract_computed(self, backlog: _SequenceBacklog, num_computed: int) -> None:
        """Subtract what was computed. Its blocks are published, so they no longer count for other requests either."""
        size = self._blocks.block_size
        done = min(num_computed // size, backlog.last)
        for block_hash in backlog.hashes[backlog.first : done]:
            self._awaited.pop(block_hash, None)
        backlog.first = max(backlog.first, done)
        tail = max(0, backlog.end - max(num_computed, backlog.last * size))
        self._num_tail_tokens += tail - backlog.tail
        backlog.tail = tail

    def _subtract_rest(self, backlog: _SequenceBacklog) -> None:
        """Subtract what a sequence still counts. A block counts on while other sequences wait for it."""
        awaited = self._awaited
        for block_hash in backlog.hashes[backlog.first : backlog.last]:
            count = awaited.get(block_hash, 0)  # 0 if another sequence has computed the block meanwhile
            if count > 1 and not self._blocks.prefix_cache.is_cached(block_hash):
                awaited[block_hash] = count - 1
            elif count:
                del awaited[block_hash]
        self._num_tail_tokens -= backlog.tail
        self.num_sequences -= 1
        self.num_context_tokens -= backlog.end


def _is_done(sequence: Sequence, backlog: _SequenceBacklog) -> bool:
    """Whether a sequence of a started group has sampled, has ended, or is a beam that was not continued."""
    if sequence.num_tokens > backlog.end or sequence.is_finished:
        return True
    return sequence not in sequence.group.sequences
