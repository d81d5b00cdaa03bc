"""Slots for states: who has one, where snapshots hang, where a match resumes, and which snapshot is lost first."""

from __future__ import annotations

import pytest

from engine.engine import Engine
from engine.kv.attachments.state_slots import StateSlots
from engine.kv.block_pool import Block
from engine.kv.prefix_cache import PrefixMatch
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.engine.kv.test_block_manager import make_sequence
from tests.engine.shadow import ShadowRunner, make_engine, run_to_end

SIZE = 4


def make(**options: object) -> tuple[Engine, ShadowRunner]:
    return make_engine(**{"block_size": SIZE, "num_slots": 12, **options})  # type: ignore[arg-type]


def ask(engine: Engine, name: str, prompt: list[int], max_tokens: int = 1) -> tuple[int, list[int]]:
    """Return how many tokens of the prompt needed not be computed, and the answer."""
    group = engine.add_request(EngineRequest(name, prompt, SamplingParams(temperature=0, max_tokens=max_tokens)))
    tokens = run_to_end(engine)[name]
    return group.sequences[0].num_cached_tokens, tokens


@pytest.mark.parametrize(("length", "resumed"), [(10, 8), (9, 8), (8, 4), (5, 4), (4, 0), (3, 0)])
def test_a_prompt_resumes_at_the_last_full_block_before_its_last_token(length: int, resumed: int) -> None:
    engine, _ = make()
    assert ask(engine, "first", list(range(length)))[0] == 0
    assert ask(engine, "again", list(range(length)))[0] == resumed


@pytest.mark.parametrize("budget", [3, 7, 64])
def test_the_next_turn_resumes_at_the_last_full_block_of_the_answer(budget: int) -> None:
    engine, runner = make(max_num_batched_tokens=budget)
    prompt = list(range(10))
    _, answer = ask(engine, "first", prompt, max_tokens=12)
    assert answer == runner.answer(prompt, 12)
    turn = [*prompt, *answer, 60, 61, 62]
    assert ask(engine, "second", turn, max_tokens=3) == (20, runner.answer(turn, 3))  # its last token was not computed


def test_where_prompts_part_the_second_one_leaves_a_snapshot_for_the_third() -> None:
    engine, _ = make()
    system = list(range(12))
    resumed = [ask(engine, str(user), [*system, *range(user, user + 9)])[0] for user in (20, 40, 50)]
    assert resumed == [0, 0, 12]


def test_prompts_part_with_windows_too() -> None:
    engine, _ = make(windows=((8, 60),))
    system = list(range(12))
    resumed = [ask(engine, str(user), [*system, *range(user, user + 9)])[0] for user in (20, 40, 50, 51)]
    assert resumed == [0, 0, 12, 12]


@pytest.mark.parametrize("budget", [3, 8, 64])
def test_the_first_prompt_that_parts_resumes_at_a_multiple_of_the_interval(budget: int) -> None:
    engine, runner = make(max_num_batched_tokens=budget, snapshot_interval=8)
    first = list(range(30))
    assert ask(engine, "first", first)[0] == 0
    assert runner.num_copied["saved state"] == 4  # after 8, 16, 24 and 28 tokens
    parted = [*first[:22], 60, 61, 62]
    assert ask(engine, "parted", parted, max_tokens=3) == (16, runner.answer(parted, 3))


def test_a_snapshot_within_a_prompt_is_lost_before_all_others_until_a_prompt_resumes_there() -> None:
    engine, _ = make(num_slots=5, max_num_seqs=1, snapshot_interval=8)  # four are left to snapshots
    first = list(range(22))
    ask(engine, "first", first)  # leaves some after 8, 16 and 20 tokens
    assert ask(engine, "hit", [*first[:10], 60])[0] == 8
    for start in (30, 40):
        ask(engine, str(start), list(range(start, start + 6)))  # each leaves one
    resumed = [ask(engine, f"again {length}", first[:length])[0] for length in (22, 18, 10)]
    assert resumed == [20, 8, 8]


def test_a_snapshot_within_a_prompt_goes_to_the_host_only_if_a_prompt_has_resumed_there() -> None:
    engine, _ = make(num_slots=5, max_num_seqs=1, snapshot_interval=8, num_host_blocks=20, num_host_slots=9)
    first = list(range(22))
    ask(engine, "first", first)  # leaves some after 8, 16 and 20 tokens
    ask(engine, "hit", [*first[:10], 60])  # resumes after 8
    for start in (30, 37, 44, 51):
        ask(engine, str(start), list(range(start, start + 6)))  # each leaves one, and four are left to snapshots
    resumed = [ask(engine, f"again {length}", first[:length])[0] for length in (18, 22)]
    assert resumed == [8, 20]


def test_snapshots_within_prompts_give_way_to_those_of_the_same_step_that_are_likely() -> None:
    engine, runner = make(num_slots=6, max_num_seqs=2, snapshot_interval=4)  # four are left to snapshots
    for name, start in (("first", 0), ("second", 30)):
        params = SamplingParams(temperature=0, max_tokens=1)
        engine.add_request(EngineRequest(name, list(range(start, start + 30)), params))
    run_to_end(engine)
    assert runner.num_copied["saved state"] == 4
    assert [ask(engine, str(start), list(range(start, start + 30)))[0] for start in (0, 30)] == [28, 28]


def test_a_snapshot_within_a_prompt_takes_no_slot_from_a_likely_one() -> None:
    engine, _ = make(num_slots=5, max_num_seqs=1, snapshot_interval=4)  # four are left to snapshots
    for start in (0, 10, 20, 30):
        ask(engine, str(start), list(range(start, start + 6)))  # each leaves one
    ask(engine, "long", list(range(30, 60)))
    assert [ask(engine, f"again {start}", list(range(start, start + 6)))[0] for start in (10, 20, 30)] == [4, 4, 4]


def test_a_likely_snapshot_takes_the_slot_of_an_unlikely_one_of_its_step() -> None:
    engine, _ = make(num_slots=5, max_num_seqs=1, snapshot_interval=4)  # four are left to snapshots
    for start in (30, 40, 50):
        ask(engine, str(start), list(range(start, start + 6)))  # each leaves one
    ask(engine, "long", list(range(18)))
    assert [ask(engine, f"again {start}", list(range(start, start + 6)))[0] for start in (30, 40, 50)] == [4, 4, 4]


def test_the_end_of_a_prompt_that_is_a_multiple_of_the_interval_is_likely() -> None:
    engine, _ = make(num_slots=5, max_num_seqs=1, snapshot_interval=8)  # four are left to snapshots
    first = list(range(16))
    _, answer = ask(engine, "first", first, max_tokens=3)  # leaves some after 8, 12 and 16 tokens
    for start in (30, 40):
        ask(engine, str(start), list(range(start, start + 6)))  # each leaves one
    assert ask(engine, "second", [*first, *answer, 60, 61])[0] == 16


def test_prompts_of_one_step_write_a_shared_snapshot_once() -> None:
    engine, runner = make(num_slots=20, snapshot_interval=8)
    params = SamplingParams(temperature=0, max_tokens=1)
    shared = list(range(16))
    for user in (20, 40):
        engine.add_request(EngineRequest(str(user), [*shared, *range(user, user + 6)], params))
    run_to_end(engine)
    assert runner.num_copied["saved state"] == 4  # after 8 and 16 tokens, and at each one's last full block


def test_the_oldest_of_the_unlikely_snapshots_is_lost_first() -> None:
    engine, _ = make(num_slots=6, max_num_seqs=1, snapshot_interval=8)  # five are left to snapshots
    for start in (0, 20):
        ask(engine, str(start), list(range(start, start + 13)))  # each leaves some after 8 and 12 tokens
    ask(engine, "other", list(range(40, 46)))  # leaves one, in the last free slot
    ask(engine, "another", list(range(50, 56)))  # leaves one
    resumed = [ask(engine, f"again {start}", [*range(start, start + 10), 60])[0] for start in (20, 0)]
    assert resumed == [8, 0]


def test_a_batch_of_one_leaves_the_other_slots_to_snapshots() -> None:
    engine, _ = make(num_slots=2, max_num_seqs=1)
    assert [ask(engine, str(index), list(range(10)))[0] for index in range(3)] == [0, 8, 8]


def test_what_lies_beyond_the_snapshot_is_computed_but_not_stored_again() -> None:
    engine, _ = make()
    prompt = list(range(17))
    ask(engine, "first", prompt)
    manager = engine.block_manager
    assert manager.states is not None
    manager.states.snapshots.clear()
    used = []

    def watch(sequence: Sequence) -> None:
        used.append(list(sequence.block_table))

    free = manager.free
    manager.free = lambda sequence: (watch(sequence), free(sequence))[1]  # type: ignore[assignment, method-assign]
    assert ask(engine, "again", prompt)[0] == 0
    manager.free = free  # type: ignore[method-assign]
    assert used[0][:4] == [block.block_id for block in manager.match_prefix(_sequence(engine, prompt)).blocks]
    assert manager.pool.counts().cached == 4


def _sequence(engine: Engine, prompt: list[int]) -> Sequence:
    group = engine.add_request(EngineRequest("probe", prompt, SamplingParams(max_tokens=1)))
    engine.abort("probe")
    return group.sequences[0]


def test_the_least_recently_used_snapshot_is_lost_first() -> None:
    engine, _ = make(num_slots=4)  # two sequences may run, and two snapshots are left while both do
    prompts = [list(range(first, first + 6)) for first in (0, 10, 20, 30, 40)]
    for index, prompt in enumerate(prompts):
        ask(engine, str(index), prompt)
    assert [ask(engine, f"again {index}", prompts[index])[0] for index in (4, 3, 0)] == [4, 4, 0]


def test_one_slot_is_for_the_sequence_that_runs() -> None:
    engine, _ = make(num_slots=1)
    assert engine.scheduler.max_num_running == 1
    for name in ("first", "again"):
        assert ask(engine, name, list(range(10)), max_tokens=20)[0] == 0


def test_a_sequence_replaces_its_own_snapshot_and_no_other() -> None:
    """The block on which it left one may have that of another sequence now."""
    states = StateSlots(12, 4, blocks := [Block(block_id) for block_id in range(4)])
    first, second = make_sequence([1]), make_sequence([2])
    for sequence in (first, second):
        states.start(sequence, PrefixMatch(), 0)
    states.keep(first, blocks[0])
    states.keep(first, blocks[1])
    assert list(states.snapshots.by_block) == [1]
    states.snapshots.detach(1)  # as if another snapshot needed the slot
    states.keep(second, blocks[1])
    states.keep(first, blocks[2])
    assert list(states.snapshots.by_block) == [1, 2]


def two_that_share(num_slots: int = 12) -> tuple[StateSlots, list[Block], Sequence, Sequence]:
    """Return slots and blocks for two sequences, of which the first has left a snapshot on block 0."""
    states = StateSlots(num_slots, 4, blocks := [Block(block_id) for block_id in range(4)])
    first, second = make_sequence([1]), make_sequence([2])
    for sequence in (first, second):
        states.start(sequence, PrefixMatch(), 0)
    states.keep(first, blocks[0])
    return states, blocks, first, second


def test_a_snapshot_moves_with_an_answer_between_slots_that_were_used_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a pool is the process's once it is touched, which takes longer than a copy."""
    engine, _ = make(num_slots=12, max_num_seqs=1)
    taken, take = list[int](), StateSlots._take

    def record(states: StateSlots) -> Block:
        slot = take(states)
        taken.append(slot.block_id)
        return slot

    monkeypatch.setattr(StateSlots, "_take", record)
    ask(engine, "long", list(range(6)), max_tokens=40)
    assert len(taken) > 8
    assert len(set(taken)) <= 4


def test_a_snapshot_that_another_answer_shares_stays_where_it_is() -> None:
    """As of two answers to one prompt, one ends and the other continues."""
    states, blocks, first, second = two_that_share()
    states.keep(second, blocks[0])
    states.keep(first, blocks[1])
    assert sorted(states.snapshots.by_block) == [0, 1]


def test_a_snapshot_at_which_another_prompt_ends_stays_where_it_is() -> None:
    states, blocks, first, second = two_that_share()
    states.save(second, SIZE, blocks[0], is_likely=True)
    states.keep(first, blocks[1])
    assert sorted(states.snapshots.by_block) == [0, 1]


def test_a_snapshot_from_which_another_prompt_has_resumed_stays_where_it_is() -> None:
    states, blocks, first, _ = two_that_share()
    states.start(make_sequence([3]), PrefixMatch(blocks=(blocks[0],), num_tokens=SIZE), 1)
    states.keep(first, blocks[1])
    assert sorted(states.snapshots.by_block) == [0, 1]


def test_a_snapshot_that_takes_the_place_of_another_one_stays_where_it_is() -> None:
    """An answer that has ended leaves its snapshot to the block that is published, which may have one."""
    states, blocks, first, second = two_that_share()
    states.keep(second, blocks[2])
    states.snapshots.move(blocks[2], blocks[0])
    states.keep(first, blocks[1])
    assert sorted(states.snapshots.by_block) == [0, 1]


def test_a_snapshot_dies_with_its_block() -> None:
    engine, _ = make(num_blocks=4)
    ask(engine, "first", list(range(10)))
    ask(engine, "other", list(range(20, 35)))
    assert engine.block_manager.states is not None
    assert ask(engine, "again", list(range(10)))[0] == 0


def test_a_prompt_resumes_at_a_snapshot_on_the_host() -> None:
    engine, runner = make(num_blocks=4, num_slots=3, num_host_blocks=20, num_host_slots=6)
    prompts = [list(range(first, first + 10)) for first in (0, 20, 40)]
    assert [ask(engine, str(first), prompt)[0] for first, prompt in enumerate(prompts)] == [0, 0, 0]
    assert [ask(engine, f"again {first}", prompt)[0] for first, prompt in enumerate(prompts)] == [8, 8, 8]
    assert runner.num_copied["state in"] == 3
    engine.reset_prefix_cache()
    assert ask(engine, "after a reset", prompts[0])[0] == 0


def test_a_snapshot_may_be_on_the_host_while_its_block_is_on_the_device() -> None:
    engine, _ = make(num_blocks=40, num_slots=3, num_host_blocks=20, num_host_slots=6)
    prompts = [list(range(first, first + 10)) for first in (0, 20, 40)]
    for name in ("first", "again"):
        resumed = [ask(engine, f"{name} {index}", prompt)[0] for index, prompt in enumerate(prompts)]
    assert resumed == [8, 8, 8]
    assert engine.block_manager.prefix_cache.num_evicted == 0


def test_a_reset_drops_the_snapshots() -> None:
    engine, _ = make()
    ask(engine, "first", list(range(10)))
    engine.reset_prefix_cache()
    assert engine.block_manager.states is not None
    assert engine.block_manager.states.slots.counts().free == 12
    assert ask(engine, "again", list(range(10)))[0] == 0


def test_no_more_sequences_run_than_have_slots() -> None:
    engine, _ = make(num_slots=6, max_num_seqs=16)
    assert engine.scheduler.max_num_running == 4
    for index in range(9):
        engine.add_request(EngineRequest(str(index), [index] * 9, SamplingParams(temperature=0, max_tokens=30)))
    most = 0
    while engine.has_unfinished:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == 4
