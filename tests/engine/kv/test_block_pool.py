"""The order in which a pool evicts, against a list that is searched."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv import block_pool
from engine.kv.block_pool import MOST_SPARED, Block, BlockPool

NUM_BLOCKS = 6
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["use", "publish", "release", "evict", "mark", "expire"]),
        st.integers(0, NUM_BLOCKS - 1),
        st.integers(0, 3),
    ),
    max_size=80,
)


class Model:
    """What is cached, in the order of use, and how often each block would still be spared."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.left: Counter[int] = Counter()
        self.retention: Counter[int] = Counter()

    def choose(self, most_spared: int) -> int:
        for _ in range(most_spared):
            if not self.left[self.order[0]]:
                break
            block_id = self.order.pop(0)
            self.left[block_id] -= 1
            self.order.append(block_id)
        return self.order[0]

    def forget(self, block_id: int) -> None:
        self.order.remove(block_id)
        self.left[block_id] = self.retention[block_id] = 0


def publish(block: Block, number: int) -> None:
    block.block_hash = block.content_id = number


@settings(max_examples=300, deadline=None)
@given(actions=ACTIONS, most_spared=st.sampled_from([2, MOST_SPARED]))
def test_blocks_are_evicted_in_the_order_of_use_after_those_that_are_spared(
    actions: list[tuple[str, int, int]], most_spared: int
) -> None:
    pool, model, used = BlockPool(NUM_BLOCKS), Model(), Counter[int]()
    for number, (action, block_id, retention) in enumerate(actions):
        block = pool.blocks[block_id]
        if action == "use" and pool.num_uncached:
            taken = pool.take()
            used[taken.block_id] = 1
            publish(taken, number)
        elif action == "publish" and block_id in model.order:
            pool.retain(block)
            model.order.remove(block_id)
            used[block_id] = 1
        elif action == "release" and used[block_id]:
            pool.release(block)
            del used[block_id]
            model.order.append(block_id)
        elif action == "evict" and model.order:
            with patch.object(block_pool, "MOST_SPARED", most_spared):
                chosen = pool.choose_evicted()
            assert chosen.block_id == model.choose(most_spared)
            chosen.forget_content()
            pool.uncache(chosen)
            model.forget(chosen.block_id)
        elif action == "mark" and (block_id in model.order or used[block_id]):
            pool.retain_longer(block, retention)
            if retention:
                model.retention[block_id] = max(retention, model.retention[block_id])
                model.left[block_id] = model.retention[block_id]
        elif action == "expire" and block_id in model.order:
            pool.expire(block)
            model.order.remove(block_id)
            model.order.insert(0, block_id)
            model.left[block_id] = 0
        pool.check_integrity(+used)


def test_one_choice_spares_a_limited_number_of_blocks() -> None:
    """A step waits for it, however many blocks are marked."""
    pool = BlockPool(10 * MOST_SPARED)
    for number in range(len(pool.blocks)):
        block = pool.take()
        publish(block, number)
        pool.retain_longer(block, 3)
        pool.release(block)
    chosen = [pool.choose_evicted() for _ in range(2)]
    assert [block.block_id for block in chosen] == [MOST_SPARED, 2 * MOST_SPARED]
    pool.check_integrity(Counter())


def test_blocks_that_are_not_published_are_not_marked() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.retain_longer(block, 3)
    assert block.retention == 0


def test_a_mark_belongs_to_the_content() -> None:
    first, second = Block(0, block_hash=1, retention=2), Block(1)
    second.copy_content(first)
    assert second.retention == 2
    second.forget_content()
    assert second.retention == 0


def test_the_block_that_was_freed_last_is_the_first_to_be_used_again() -> None:
    pool = BlockPool(4)
    first, second = pool.take(), pool.take()
    pool.release(first)
    pool.release(second)
    assert [pool.take() for _ in range(3)] == [second, first, pool.blocks[2]]
