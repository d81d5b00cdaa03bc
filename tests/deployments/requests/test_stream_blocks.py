"""The hashes of a stream's blocks are those of one text that holds the prompt and the answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deployments.requests.prompt import Prompt
from deployments.requests.stream_blocks import StreamBlocks
from engine.kv.prefix_hash import hash_blocks
from engine.request import EngineRequest


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=40),
    st.lists(st.lists(st.integers(0, 99), max_size=20), max_size=5),
    st.integers(1, 9),
)
def test_they_grow_with_the_answer(prompt_ids: list[int], parts: list[list[int]], size: int) -> None:
    root = EngineRequest("", prompt_ids, cache_salt="salt").cache_root("model")
    hashes = hash_blocks(prompt_ids, size, root)
    blocks = StreamBlocks(Prompt(EngineRequest("", prompt_ids), list(hashes), root=root, block_size=size))
    output: list[int] = []
    for part in ([], *parts):
        output += part
        assert list(blocks.hashes(output)) == hash_blocks([*prompt_ids, *output], size, root)
