"""The blocks that sharing saves if one prompt has several continuations: parallel samples, and beams.

    saved = (blocks without sharing - blocks with sharing) / blocks without sharing, summed over a request's steps

Without sharing, each of the n continuations has its own blocks. The engine's BlockManager does the sharing and the
copy-on-write that are counted here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.kv_memory.length_traces import Lengths
from engine.kv.block_manager import BlockManager
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceGroup

__all__ = ["SharedBlocks", "beam_search_savings", "parallel_savings"]


class SharedBlocks:
    """Continuations of one prompt that grow on the engine's BlockManager as under the scheduler."""

    def __init__(self, block_size: int, max_length: int, num_sequences: int) -> None:
        self._blocks = BlockManager(
            num_sequences * -(-max_length // block_size), block_size, enable_prefix_caching=False
        )
        self._params = SamplingParams(n=num_sequences)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._blocks.block_size

    @property
    def num_used(self) -> int:
        """Blocks that at least one sequence lists."""
        return self._blocks.pool.counts().used

    def add(self, num_tokens: int) -> Sequence:
        """Begin a sequence of ``num_tokens`` computed tokens."""
        group = SequenceGroup(
            EngineRequest("request", [0] * num_tokens, self._params),
            arrival=0,
            root=0,
            stop_token_ids=frozenset(),
            max_total_tokens=10**9,
            seed=0,
        )
        sequence = group.sequences[0]
        self._blocks.allocate(sequence, num_tokens)
        sequence.num_computed_tokens = num_tokens
        return sequence

    def fork(self, parent: Sequence) -> Sequence:
        """Begin a sequence that shares all blocks of ``parent``."""
        child = parent.fork(1, 0)
        self._blocks.fork(parent, child)
        return child

    def append(self, sequence: Sequence) -> None:
        """Write one more token, in a new block or in a copy where the last block is shared."""
        sequence.token_ids.append(0)
        if sequence.num_computed_tokens >= sequence.next_block_boundary:
            self._blocks.allocate(sequence, sequence.num_tokens)
        sequence.num_computed_tokens += 1

    def free(self, sequence: Sequence) -> None:
        """End a sequence."""
        self._blocks.free(sequence)


@dataclass
class _Saving:
    """Blocks with and without sharing, summed over steps."""

    shared: int = 0
    unshared: int = 0

    def record(self, pool: SharedBlocks, num_sequences: int, num_tokens: int) -> None:
        self.shared += pool.num_used
        self.unshared += num_sequences * -(-num_tokens // pool.block_size)

    @property
    def share(self) -> float:
        return 1 - self.shared / self.unshared


def parallel_savings(requests: list[Lengths], samples: int, pool: SharedBlocks) -> float:
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


def beam_search_savings(requests: list[Lengths], width: int, pool: SharedBlocks, *, seed: int) -> float:
    """Return the share of blocks saved by beams of a synthetic model.

    A beam's next token has probabilities from stick-breaking with Beta(2, 1) sticks: the most likely token has two
    thirds on average, the second two thirds of the rest, and so on. Each step keeps the ``width`` highest sums of
    log-probabilities among the ``width`` most likely tokens of all beams, as beam search does.
    """
    generator = np.random.default_rng(seed)
    saving = _Saving()
    for request in requests:
        sticks = generator.beta(2, 1, (request.output, width, width))
        rest = np.cumsum(np.log1p(-sticks), axis=2)
        log_probs = np.log(sticks) + np.concatenate([np.zeros_like(rest[..., :1]), rest[..., :-1]], axis=2)
        first = pool.add(request.prompt)
        beams = [first, *(pool.fork(first) for _ in range(width - 1))]
        scores = log_probs[0, 0]  # of the most likely tokens after the prompt
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


def _descend(pool: SharedBlocks, beams: list[Sequence], parents: list[int]) -> list[Sequence]:
    """Return the beams of the next step, one for each entry of ``parents``; a parent is reused as its first child."""
    seen: set[int] = set()
    children = []
    for parent in parents:
        children.append(pool.fork(beams[parent]) if parent in seen else beams[parent])
        seen.add(parent)
    for index, beam in enumerate(beams):
        if index not in seen:
            pool.free(beam)
    return children
