"""StreamBlocks: the hashes of a prompt's blocks and of those that its answer has filled so far.

An answer that moves to another replica needs the KV of all its tokens, and the router finds it by these hashes.
"""

from __future__ import annotations

from collections.abc import Sequence

from deployments.requests.prompt import Prompt
from engine.kv.prefix_hash import block_hash

__all__ = ["StreamBlocks"]


class StreamBlocks:
    """The hashed blocks of one stream. Each block is hashed once, when it is asked for.

    Args:
        prompt: the prompt, with the hashes of its blocks.
    """

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._hashes: list[int] | None = None

    def hashes(self, output: Sequence[int]) -> list[int]:
        """Return the hashes of all full blocks of the prompt and its answer; the caller must not change the list.

        Args:
            output: the tokens of the answer so far.
        """
        prompt, size = self._prompt, self._prompt.block_size
        if not output or not size:
            return prompt.block_hashes
        hashes = self._hashes = list(prompt.block_hashes) if self._hashes is None else self._hashes
        token_ids, num_prompt_tokens = prompt.token_ids, len(prompt.token_ids)
        for index in range(len(hashes), (num_prompt_tokens + len(output)) // size):
            start, end = index * size, (index + 1) * size
            of_prompt, of_output = token_ids[start:end], output[max(0, start - num_prompt_tokens) :]
            block = [*of_prompt, *of_output[: size - len(of_prompt)]]
            hashes.append(block_hash(hashes[-1] if hashes else prompt.root, block))
        return hashes
