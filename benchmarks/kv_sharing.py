"""What sharing blocks saves when one prompt has several continuations: parallel samples, and beams.

    saved = (blocks without sharing - blocks with sharing) / blocks without sharing, summed over a request's steps

Without sharing, each of n continuations has all blocks of its own. Blocks are counted exactly, through the small
interface of a BlockPool; ReferencePool is the plainest thing that satisfies it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from benchmarks.length_traces import Lengths

__all__ = ["BlockPool", "ReferencePool", "beam_search_savings", "parallel_savings"]


class BlockPool(Protocol):
    """Sequences whose blocks are shared by reference count and copied on the first write."""

    block_size: int

    @property
    def num_used(self) -> int:
        """Blocks that at least one sequence lists."""

    def add(self, num_tokens: int) -> int:
        """Begin a sequence of ``num_tokens`` tokens; return its number."""

    def fork(self, parent: int) -> int:
        """Begin a sequence that shares all blocks of ``parent``; return its number."""

    def append(self, sequence: int) -> None:
        """Write one more token, in a new block or in a copy where the last block is shared."""

    def free(self, sequence: int) -> None:
        """End a sequence."""


@dataclass
class ReferencePool:
    """A BlockPool of unlimited size that only counts."""

    block_size: int
    _tables: dict[int, list[int]] = field(default_factory=dict)
    _lengths: dict[int, int] = field(default_factory=dict)
    _uses: Counter[int] = field(default_factory=Counter)
    _next: int = 0

    @property
    def num_used(self) -> int:
        """Blocks that at least one sequence lists."""
        return len(self._uses)

    def add(self, num_tokens: int) -> int:
        """Begin a sequence of blocks of its own."""
        sequence = self._number()
        self._tables[sequence] = [self._take() for _ in range(-(-num_tokens // self.block_size))]
        self._lengths[sequence] = num_tokens
        return sequence

    def fork(self, parent: int) -> int:
        """Begin a sequence that lists its parent's blocks."""
        child = self._number()
        self._tables[child] = list(self._tables[parent])
        self._lengths[child] = self._lengths[parent]
        self._uses.update(self._tables[child])
        return child

    def append(self, sequence: int) -> None:
        """Write one more token; a full last block is followed by a new one, a shared one is replaced by a copy."""
        table = self._tables[sequence]
        if self._lengths[sequence] % self.block_size == 0:
            table.append(self._take())
        elif self._uses[table[-1]] > 1:
            self._uses[table[-1]] -= 1
            table[-1] = self._take()
        self._lengths[sequence] += 1

    def free(self, sequence: int) -> None:
        """Drop a sequence's uses of its blocks."""
        for block in self._tables.pop(sequence):
            self._uses[block] -= 1
            if not self._uses[block]:
                del self._uses[block]
        del self._lengths[sequence]

    def _take(self) -> int:
        block = self._number()
        self._uses[block] = 1
        return block

    def _number(self) -> int:
        self._next += 1
        return self._next


@dataclass
class _Saving:
    """Blocks with and without sharing, summed over steps."""

    shared: int = 0
    unshared: int = 0

    def record(self, pool: BlockPool, num_sequences: int, num_tokens: int) -> None:
        self.shared += pool.num_used
        self.unshared += num_sequences * -(-num_tokens // pool.block_size)

    @property
    def share(self) -> float:
        return 1 - self.shared / self.unshared


def parallel_savings(requests: list[Lengths], samples: int, pool: BlockPool) -> float:
    """Return the share of blocks saved when each prompt is sampled ``samples`` times, to the same length each time."""
    saving = _Saving()
    for request in requests:
        first = pool.add(request.prompt)
        sequences = [first, *(pool.fork(first) for _ in range(samples - 1))]
        saving.record(pool, samples, request.prompt)
        for written in range(1, request.output):  # the last token is sampled and never written
            for sequence in sequences:
                pool.append(sequence)
            saving.record(pool, samples, request.prompt + written)
        for sequence in sequences:
            pool.free(sequence)
    return saving.share


def beam_search_savings(requests: list[Lengths], width: int, pool: BlockPool, *, seed: int) -> float:
    """Return the share of blocks saved by beams of a synthetic model.

    A beam's next token has probabilities from stick-breaking with Beta(2, 1) sticks: the likeliest token takes two
    thirds on average, the second two thirds of the rest, and so on. Each step keeps the ``width`` highest sums of
    log-probabilities among all beams' ``width`` likeliest tokens, as beam search does.
    """
    generator = np.random.default_rng(seed)
    saving = _Saving()
    for request in requests:
        sticks = generator.beta(2, 1, (request.output, width, width))
        rest = np.cumsum(np.log1p(-sticks), axis=2)
        log_probs = np.log(sticks) + np.concatenate([np.zeros_like(rest[..., :1]), rest[..., :-1]], axis=2)
        first = pool.add(request.prompt)
        beams = [first, *(pool.fork(first) for _ in range(width - 1))]
        scores = log_probs[0, 0]  # of the likeliest tokens behind the prompt
        saving.record(pool, width, request.prompt)
        for written in range(1, request.output):
            for beam in beams:
                pool.append(beam)
            saving.record(pool, width, request.prompt + written)
            candidates = (scores[:, None] + log_probs[written]).ravel()
            chosen = np.argpartition(-candidates, width - 1)[:width]
            scores = candidates[chosen]
            beams = _descend(pool, beams, (chosen // width).tolist())
        for beam in beams:
            pool.free(beam)
    return saving.share


def _descend(pool: BlockPool, beams: list[int], parents: list[int]) -> list[int]:
    """Return the beams of the next step, one for each entry of ``parents``: a parent lives on as its first child."""
    seen: set[int] = set()
    children = []
    for parent in parents:
        children.append(pool.fork(beams[parent]) if parent in seen else beams[parent])
        seen.add(parent)
    for index, beam in enumerate(beams):
        if index not in seen:
            pool.free(beam)
    return children
