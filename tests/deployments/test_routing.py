"""The routing policy and its index, without Ray."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from deployments.kv_index import KVIndex
from deployments.routing import RoutingState, load_limit, rank

names = st.sampled_from(["a", "b", "c", "d", "e"])
hash_lists = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6, unique=True)


@given(st.dictionaries(names, st.integers(0, 100), min_size=1), st.dictionaries(names, st.integers(1, 6)), hash_lists,
       st.floats(1.0, 3.0), st.integers(0, 8))  # fmt: skip
def test_the_first_choice_is_within_the_load_bound(
    loads: dict[str, int], depths: dict[str, int], hashes: list[int], bound: float, slack: int
) -> None:
    ranking = rank(loads, depths, hashes, bound=bound, slack=slack)
    limit = load_limit(loads, bound, slack)
    assert sorted(ranking.order) == sorted(loads)
    first = ranking.order[0]
    assert loads[first] <= limit
    within = [name for name in loads if loads[name] <= limit]
    assert depths.get(first, 0) == max(depths.get(name, 0) for name in within)


def test_the_longest_prefix_wins() -> None:
    ranking = rank({"a": 0, "b": 0, "c": 0}, {"a": 1, "c": 3}, [1, 2, 3], bound=1.25, slack=4)
    assert ranking.order[:2] == ["c", "a"]
    assert ranking.outcome == "hit"


def test_an_overloaded_replica_is_passed_over() -> None:
    ranking = rank({"a": 40, "b": 0}, {"a": 3}, [1, 2, 3], bound=1.25, slack=4)
    assert ranking.order == ["b", "a"]
    assert ranking.outcome == "balanced"


def test_without_hashes_the_least_loaded_is_first() -> None:
    assert rank({"a": 2, "b": 1, "c": 3}, {}, [], bound=1.25, slack=4).order == ["b", "a", "c"]


def test_prompts_too_short_for_a_block_take_turns() -> None:
    chosen = Counter(
        rank(dict.fromkeys("abc", 0), {}, [], bound=1.25, slack=4, turn=turn).order[0] for turn in range(30)
    )
    assert chosen == {"a": 10, "b": 10, "c": 10}


def test_one_new_prompt_meets_on_one_replica_and_many_spread() -> None:
    loads = dict.fromkeys("abcd", 0)
    assert len({rank(loads, {}, [7, 8, 9], bound=1.25, slack=4).order[0] for _ in range(20)}) == 1
    chosen = Counter(rank(loads, {}, [prompt, 0], bound=1.25, slack=4).order[0] for prompt in range(400))
    assert set(chosen) == set(loads)
    assert min(chosen.values()) > 60


def test_prompts_that_share_only_their_first_block_spread_too() -> None:
    """In a chat every request shares the system prompt: hashing the first block would send all to one replica."""
    loads, depths = dict.fromkeys("abcd", 0), dict.fromkeys("abcd", 1)
    chosen = Counter(rank(loads, depths, [1, second], bound=1.25, slack=4).order[0] for second in range(400))
    assert min(chosen.values()) > 60


def test_every_ingress_chooses_alike_and_a_lost_replica_moves_only_its_own() -> None:
    before = {prompt: rank(dict.fromkeys("abcd", 0), {}, [prompt], bound=1, slack=0).order[0] for prompt in range(200)}
    after = {prompt: rank(dict.fromkeys("dba", 0), {}, [prompt], bound=1, slack=0).order[0] for prompt in range(200)}
    assert all(after[prompt] == replica for prompt, replica in before.items() if replica != "c")


def test_a_prefix_counts_only_while_unbroken() -> None:
    index = KVIndex()
    index.stored("a", [1, 2, 3, 4])
    index.stored("b", [1, 2])
    assert index.longest_prefix([1, 2, 3, 9]) == {"a": 3, "b": 2}
    index.removed("a", [2])
    assert index.longest_prefix([1, 2, 3]) == {"a": 1, "b": 2}
    assert index.longest_prefix([9]) == {}
    assert index.longest_prefix([]) == {}


def test_a_cleared_replica_holds_nothing() -> None:
    index = KVIndex()
    index.stored("a", [1, 2])
    index.stored("b", [2])
    index.cleared("a")
    assert index.longest_prefix([1, 2]) == {}
    assert index.longest_prefix([2]) == {"b": 1}
    assert len(index) == 1


def test_the_index_is_bounded_and_forgets_tails_first() -> None:
    index = KVIndex(max_blocks=4)
    index.stored("a", [1, 2, 3])
    index.stored("a", [7, 8])
    assert len(index) == 4
    assert index.longest_prefix([1, 2, 3]) == {"a": 2}


operations_on_an_index = st.lists(
    st.tuples(st.sampled_from(["stored", "removed", "cleared"]), names, st.lists(st.integers(0, 9), max_size=5)),
    max_size=40,
)


@given(operations_on_an_index)
def test_the_index_agrees_with_a_plain_model(operations: list[tuple[str, str, list[int]]]) -> None:
    index, model = KVIndex(), dict[str, set[int]]()
    for verb, replica, hashes in operations:
        held = model.setdefault(replica, set())
        if verb == "stored":
            index.stored(replica, hashes)
            held |= set(hashes)
        elif verb == "removed":
            index.removed(replica, hashes)
            held -= set(hashes)
        else:
            index.cleared(replica)
            held.clear()
    for block in range(10):
        assert set(index.longest_prefix([block])) == {replica for replica, held in model.items() if block in held}
    assert len(index) == len(set().union(*model.values(), set()))


def test_a_replica_that_is_gone_is_forgotten() -> None:
    state = RoutingState()
    state.set_replicas(["a", "b"])
    state.index.stored("a", [1])
    state.sent("a")
    state.sent("b")
    state.set_replicas(["b"])
    assert state.index.longest_prefix([1]) == {}
    assert dict(state.in_flight) == {"b": 1}
    state.completed("b")
    state.completed("b")  # Serve reports some failures twice
    assert dict(state.in_flight) == {}
    state.stored("a", [1])  # answers of a replica that has gone come late
    state.sent("a")
    assert (len(state.index), dict(state.in_flight)) == (0, {})
