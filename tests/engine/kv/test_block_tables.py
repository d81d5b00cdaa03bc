"""Block tables that stay on the ranks: what a step sends, and what the ranks then have."""

from __future__ import annotations

import pickle

import pytest
import torch

from engine.kv.block_tables import BlockTables, TableTracker

ROWS, WIDTH = 3, 5


class Ranks:
    """A tracker, and the tables of a rank that gets only the changes."""

    def __init__(self) -> None:
        self.tracker = TableTracker(ROWS, WIDTH)
        self.tables = BlockTables(ROWS, WIDTH, torch.device("cpu"))

    def step(self, *tables: list[int]) -> int:
        """Make a step with these tables; return how many entries it sent."""
        rows, changes = self.tracker.update(list(tables))
        self.tables.write(*(torch.from_numpy(array) for array in pickle.loads(pickle.dumps(changes))))
        held = self.tables.select(torch.from_numpy(rows), WIDTH)
        assert held.tolist() == [table + [-1] * (WIDTH - len(table)) for table in tables]
        assert held.is_contiguous()
        return len(changes.entries)


def test_only_what_was_appended_is_sent() -> None:
    ranks, a, b = Ranks(), [7, 8], [3]
    assert ranks.step(a, b) == 3
    assert ranks.step(a, b) == 0
    b.append(9)
    assert ranks.step(a, b) == 1
    a += [1, 2]
    b.append(4)
    assert ranks.step(a, b) == 3


def test_a_sequence_that_joins_leaves_the_others_where_they_are() -> None:
    ranks, a, b, c = Ranks(), [7, 8], [3], [4, 5, 6]
    ranks.step(a, b)
    assert ranks.step(c, a, b) == 3
    assert ranks.step(b, c, a) == 0
    assert ranks.step(b) == 0
    assert ranks.step() == 0


def test_the_row_of_a_sequence_that_has_left_is_cleared_for_the_next() -> None:
    ranks, a, b, c = Ranks(), [7, 8, 9, 2], [3], [4]
    ranks.step(a, b, c)
    assert ranks.step(b, [5], c) == 4  # one block, and three entries of the other table
    assert ranks.step(b, c) == 0
    assert ranks.step(a, b, c) == 4


def test_a_table_in_a_new_list_is_sent_again() -> None:
    """As after a preemption or a copy on write, also if it has as many blocks as before."""
    ranks, a, b = Ranks(), [7, 8], [3]
    ranks.step(a, b)
    assert ranks.step([7, 4], b) == 2


def test_blocks_of_rejected_drafts_are_sent_again() -> None:
    ranks, a = Ranks(), [7, 8, 9]
    ranks.step(a)
    ranks.tracker.expect_removal(0, 1)
    a[1:] = [4]
    assert ranks.step(a) == 2  # the new block, and the end of the table
    assert ranks.step(a) == 0
    ranks.tracker.expect_removal(0, 1)
    assert ranks.step(a) == 1  # it has lost none, which the tracker does not know


def test_ranks_that_missed_a_step_get_all_tables_again() -> None:
    ranks, a, b, c = Ranks(), [7, 8], [3], [4, 5, 6]
    ranks.step(a, b, c)
    b.append(2)
    ranks.tracker.update([a, b])
    ranks.tracker.update([a, b, [9]])
    ranks.tracker.forget()
    assert ranks.step(b, a) == 2 * WIDTH
    assert ranks.step([6], a, b) == WIDTH
    assert ranks.step([6, 1], a, b) == 2


def test_a_table_longer_than_was_expected_is_not_written_over_the_next_row() -> None:
    with pytest.raises(AssertionError, match="6 blocks"):
        Ranks().step([1, 2, 3, 4, 5, 6])
