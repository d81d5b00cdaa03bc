"""Prompts: tokens or text that share prefixes exactly as the hashed blocks of a trace do.

A hash of a trace stands for a block and all blocks before it. So each hash gets a first token of its own.
"""

from __future__ import annotations

import base64
import random

from benchmarks.routing.rivals.side import Hashes, Request

__all__ = ["CHARACTERS", "Prompts", "signed"]

CHARACTERS = 4  # of text for each token
_FIRST_TOKEN = 100
_FILL_TOKEN = 7


def signed(value: int) -> int:
    """Return an unsigned 64-bit number as the signed one with the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


class Prompts:
    """The blocks of all requests that have been seen."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.index: dict[int, int] = {}  # hash -> dense number
        self.parent: dict[int, int | None] = {}  # hash -> hash of the block before it

    def add(self, request: Request) -> list[int]:
        """Number the blocks of a request; return the hashes that are new."""
        new, parent = [], None
        for block in request.hashes:
            if block not in self.index:
                self.index[block], self.parent[block] = len(self.index), parent
                new.append(block)
            assert self.parent[block] == parent, f"block {block} has two parents: the hashes are not chained"
            parent = block
        return new

    def block_tokens(self, block: int) -> list[int]:
        """Return the tokens of one block."""
        return [_FIRST_TOKEN + self.index[block]] + [_FILL_TOKEN] * (self.block_size - 1)

    def chain_tokens(self, blocks: Hashes) -> list[int]:
        """Return the tokens of several blocks."""
        return [token for block in blocks for token in self.block_tokens(block)]

    def tokens(self, request: Request, last: int) -> list[int]:
        """Return a prompt; ``last`` is the token after the last full block, repeated to the prompt's length."""
        rest = request.input_tokens - len(request.hashes) * self.block_size
        return self.chain_tokens(request.hashes) + [last] * rest

    def text(self, request: Request) -> str:
        """Return a prompt as text of ``CHARACTERS`` for each token."""
        rest = request.input_tokens - len(request.hashes) * self.block_size
        blocks = [_text(f"block {self.index[block]}", self.block_size) for block in request.hashes]
        return "".join(blocks) + _text(f"request {request.job}", rest)


def _text(seed: str, tokens: int) -> str:
    return base64.b64encode(random.Random(seed).randbytes(3 * tokens)).decode()
