"""The chained block hash."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.kv.prefix_hash import block_hash, hash_blocks, root_hash


@given(st.lists(st.integers(0, 2**32 - 1), max_size=64), st.integers(1, 16))
def test_hashes_chain_over_full_blocks(token_ids: list[int], block_size: int) -> None:
    root = root_hash("model")
    hashes = hash_blocks(token_ids, block_size, root)
    assert len(hashes) == len(token_ids) // block_size
    for index, parent in enumerate([root, *hashes[:-1]][: len(hashes)]):
        assert hashes[index] == block_hash(parent, token_ids[index * block_size : (index + 1) * block_size])


def test_a_changed_token_changes_its_block_and_all_later_ones() -> None:
    root = root_hash("model")
    before = hash_blocks(list(range(12)), 4, root)
    after = hash_blocks([*range(5), 99, *range(6, 12)], 4, root)
    assert before[0] == after[0]
    assert before[1] != after[1]
    assert before[2] != after[2]


def test_model_and_cache_key_each_give_another_root() -> None:
    roots = [root_hash("m"), root_hash("m", "a"), root_hash("ma"), root_hash("", "ma"), root_hash("", "m")]
    assert len(set(roots)) == len(roots)


def test_known_value_so_that_a_change_of_format_is_noticed() -> None:
    """Routers and engines of different versions must not disagree silently."""
    assert hash_blocks([1, 2, 3, 4], 2, 0) == [4303593621178840135, 3869898853897586833]
