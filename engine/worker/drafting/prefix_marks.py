"""PrefixMarks: which tokens of a sequence the draft model has computed, read from the pages of the KV cache.

The draft model's keys and values are in the same pages as those of the model whose tokens it drafts, but it computes
them later, or not at all while drafts do not pay. A page is shared by prefix, copied, swapped out and sent to other
replicas, so no list of sequences can say what it holds. Each token of a page has a mark instead: a hash of all tokens
up to it, written with its keys and values, and copied with them. They are those of a sequence's token if the mark is
the hash of the sequence up to there.

The hash is polynomial: that of a longer text is computed from its new tokens alone. Two texts of one hash would give
bad drafts, and no wrong answer: the large model verifies every draft.

What a layer of multi-token prediction keeps of a token depends on the next one, too, so its marks are hashes up to the
next token. The last token of a block that several sequences share has a different next token in each. What is kept of
it is that of one of them, and serves all of them: else each would compute it, and all tokens after it, again and again.
"""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from engine.kv.page_copies import PageCopies
from engine.sequence import Sequence

__all__ = ["HostPrefixMarks", "PrefixMarks"]

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers never become zero
_INVERSE = np.uint64(pow(int(_BASE), -1, 2**64))
_LEAST_LENGTH = 256  # of the tables: they grow by doubling
_MOST_TOKEN_IDS = np.uint64(2**32)

_Hashes = npt.NDArray[np.uint64]


class PrefixMarks:
    """The marks of one KV cache.

    Args:
        part: the cache that a PrefixMark declares, ``[num_pages, block_size, 8 bytes]``, on a CPU.
        include_next: what is kept of a token depends on the next one, too.
    """

    def __init__(self, part: torch.Tensor, *, include_next: bool = False) -> None:
        self._ahead = int(include_next)
        self._marks: _Hashes = part.view(torch.int64).numpy().view(np.uint64)[..., 0]  # [num_pages, block_size]
        self._powers = _powers(_BASE, _LEAST_LENGTH)
        self._inverses = _powers(_INVERSE, _LEAST_LENGTH)
        self._chains: WeakKeyDictionary[Sequence, _Chain] = WeakKeyDictionary()

    def num_computed(self, sequence: Sequence) -> int:
        """Return of how many leading tokens of a sequence its blocks have keys and values of the draft model.

        Those of the last call are not compared again while the sequence has the same table: what the blocks of a
        running sequence hold of its known tokens changes only with another table.
        """
        known, table = self._hashes(sequence), sequence.block_table
        hashes = known[self._ahead :]
        chain = self._chains[sequence]
        if chain.table is not table:
            chain.table, chain.num_computed = table, 0
        first_block = chain.num_computed // self._marks.shape[1]
        start = first_block * self._marks.shape[1]
        pages = self._marks[table[first_block:]].reshape(-1)[: len(hashes) - start]
        is_same = pages == hashes[start : start + len(pages)]
        if self._ahead:
            is_same |= self._have_another_next(pages, known, start)
        chain.num_computed = start + (len(is_same) if is_same.all() else int(is_same.argmin()))
        return chain.num_computed

    def _have_another_next(self, pages: _Hashes, known: _Hashes, start: int) -> npt.NDArray[np.bool_]:
        """Return which marks, from index ``start`` on, are of the last token of a block with any next token."""
        end = start + len(pages)
        if end >= len(self._inverses):
            self._inverses = _powers(_INVERSE, 2 * end)
        next_ids = (pages - known[start:end]) * self._inverses[start + 1 : end + 1] - np.uint64(1)
        is_last: npt.NDArray[np.bool_] = np.arange(start + 1, end + 1) % self._marks.shape[1] == 0
        return is_last & (next_ids < _MOST_TOKEN_IDS)

    def write(self, sequence: Sequence, first: int, draft: GenericSequence[int], slots: npt.NDArray[np.int64]) -> None:
        """Mark tokens as computed.

        Args:
            first: index of the first of them in the sequence, or in the draft after it.
            draft: tokens that follow the sequence.
            slots: of the KV cache, one for each of the tokens.
        """
        hashes, first = self._hashes(sequence), first + self._ahead
        end = first + len(slots)
        if end > len(hashes):
            hashes = np.concatenate((hashes, self._after(hashes, draft[: end - len(hashes)])))
        self._marks.reshape(-1)[slots] = hashes[first:end]

    def forget(self, slots: npt.NDArray[np.int64]) -> None:
        """Take the marks of these slots away."""
        self._marks.reshape(-1)[slots] = 0

    def _hashes(self, sequence: Sequence) -> _Hashes:
        """Return the hashes of a sequence up to each of its known tokens."""
        chain, num_tokens = self._chains.get(sequence), len(sequence.token_ids)
        if chain is None:
            chain = self._chains[sequence] = _Chain()
        if chain.length < num_tokens:
            known = chain.hashes[: chain.length]
            chain.append(self._after(known, sequence.token_ids[chain.length :]))
        return chain.hashes[:num_tokens]

    def _after(self, known: _Hashes, token_ids: GenericSequence[int]) -> _Hashes:
        """Return the hashes of a text up to each of its next tokens, given those of the tokens before."""
        first, end = len(known), len(known) + len(token_ids)
        if end > len(self._powers):
            self._powers = _powers(_BASE, 2 * end)
        terms = (np.array(token_ids, dtype=np.uint64) + np.uint64(1)) * self._powers[first:end]
        terms[:1] += known[-1:].sum(dtype=np.uint64)  # of an array, since a number would warn that it wraps around
        return np.cumsum(terms, dtype=np.uint64)


class HostPrefixMarks(PrefixMarks):
    """The marks of a KV cache that is on a GPU, where the host cannot read them without waiting.

    They are a table on the host instead, which follows the copies of blocks. Pages that come from a disk or from
    another replica bring no marks: the draft model computes their tokens again when it needs them.

    Args:
        num_blocks: of the device.
        num_host_blocks: of the host pool.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        super().__init__(torch.zeros(num_blocks, block_size, 1, dtype=torch.int64))
        self._on_host: _Hashes = np.zeros((num_host_blocks, block_size), dtype=np.uint64)

    def follow(self, copies: PageCopies) -> None:
        """Copy the marks as a step copies the blocks."""
        for pairs, target, source in (
            (copies.swap_out, self._on_host, self._marks),
            (copies.swap_in, self._marks, self._on_host),
            (copies.on_device, self._marks, self._marks),
        ):
            if pairs:
                sources, targets = map(list, zip(*pairs, strict=True))
                target[targets] = source[sources]  # numpy reads all of them first


class _Chain:
    """The hashes of one sequence so far.

    Attributes:
        table: its block table when its marks were last compared.
        num_computed: how many of its tokens were found computed then.
    """

    def __init__(self) -> None:
        self.table: list[int] | None = None
        self.num_computed = 0
        self.hashes: _Hashes = np.empty(_LEAST_LENGTH, dtype=np.uint64)
        self.length = 0

    def append(self, hashes: _Hashes) -> None:
        end = self.length + len(hashes)
        if end > len(self.hashes):
            self.hashes = np.concatenate((self.hashes[: self.length], np.empty(end, dtype=np.uint64)))
        self.hashes[self.length : end] = hashes
        self.length = end


def _powers(base: np.uint64, count: int) -> _Hashes:
    """Return the first powers of a number, modulo 2**64."""
    return np.cumprod(np.full(count, base, dtype=np.uint64), dtype=np.uint64)
