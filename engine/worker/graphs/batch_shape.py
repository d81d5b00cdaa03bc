"""BatchShape: what a graph has room for, and the shapes that get one."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MAX_CHUNKS", "BatchShape", "chunk_sizes", "decode_sizes", "mixed_decode_sizes"]

MAX_CHUNKS = 32  # of a step: prompts and sequences with drafts; more are rare, and their step is long
_CHUNK_SIZES = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


class BatchShape(NamedTuple):
    """A batch as a graph computes it: first the decodes, then the chunks, each padded.

    Attributes:
        num_decodes: sequences that compute one token each, none of them a prompt's.
        num_chunks: the others; the last one is padding, and has all tokens of ``chunk_tokens`` that no other has.
        chunk_tokens: tokens of all chunks together.
    """

    num_decodes: int
    num_chunks: int = 0
    chunk_tokens: int = 0

    @classmethod
    def mixed(cls, num_decodes: int, chunk_tokens: int) -> BatchShape:
        """Return a shape with room for as many chunks as graphs have, and the one of padding."""
        return cls(num_decodes, MAX_CHUNKS + 1, chunk_tokens)

    @property
    def num_seqs(self) -> int:
        """Decodes and chunks."""
        return self.num_decodes + self.num_chunks

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self.num_decodes + self.chunk_tokens


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of decodes that get a graph without chunks, ascending: 1, 2, 4, then at least every eighth.

    The last is ``max_num_seqs``. Above 256 the steps grow with the number, so that padding adds at most a sixteenth.
    """
    sizes, size = [1, 2, 4], 8
    while size < max_num_seqs:
        sizes.append(size)
        size += max(8, (1 << size.bit_length() - 1) // 16)
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def mixed_decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of decodes that get graphs with chunks: 0, 8, 32, 128, ... and ``max_num_seqs``.

    They are few, because a padded decode costs a token, of which such a step computes many.
    """
    sizes, size = [0], 8
    while size < max_num_seqs:
        sizes.append(size)
        size *= 4
    return [*sizes, max_num_seqs]


def chunk_sizes(max_chunk_tokens: int) -> list[int]:
    """Return the numbers of chunks' tokens that get graphs, ascending, up to ``max_chunk_tokens`` and 2,048."""
    largest = min(_CHUNK_SIZES[-1], max_chunk_tokens)
    return [*(size for size in _CHUNK_SIZES if size < largest), largest]
