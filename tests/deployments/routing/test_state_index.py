"""What a prefix hit is worth on replicas whose model has states: up to the last block with a state."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deployments.routing.cluster_view import ClusterView
from deployments.routing.cost import PromptBlocks
from deployments.routing.state_index import StateIndex
from engine.observability.load import EngineLoad
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.deployments.routing.dispatches import dispatch_of, send
from tests.engine.kv.test_events import blocks_with_state
from tests.engine.shadow import make_engine, run_to_end

IDLE = EngineLoad(0, 0, 0, 1_000, 1_000, 1_000.0, 0)
SIZE = 16
PROMPT = list(range(100, 110))


def make_view(**states: list[int] | None) -> ClusterView:
    """Return a view of idle replicas that hold nothing; each has these states, or None."""
    view = ClusterView(clock=lambda: 0.0)
    view.set_replicas({name: {} for name in states})
    for name, blocks in states.items():
        view.routing.replaced(name, [], blocks)
        view.routing.report(name, IDLE, now=0.0)
    return view


def cached(view: ClusterView, num_tokens: int = 10 * SIZE + 1) -> dict[str, int]:
    """Return how many blocks of the prompt each replica need not compute."""
    return dict(view.routing.num_cached_blocks(PromptBlocks(num_tokens, PROMPT[: num_tokens // SIZE], SIZE)))


def test_a_short_chain_with_a_state_at_its_end_is_cheaper_than_a_whole_one_with_an_early_state() -> None:
    view = make_view(whole=[], short=[])
    for name, blocks, states in (("whole", PROMPT, PROMPT[1:2]), ("short", PROMPT[:5], PROMPT[4:5])):
        view.routing.stored(name, blocks)
        view.routing.states_stored(name, states)
    dispatch = dispatch_of(PROMPT, 10 * SIZE + 1)
    decision = view.choose(dispatch, ["whole", "short"])
    assert decision.replica == "short"
    assert (decision.num_cached_blocks, decision.max_cached_blocks) == (5, 5)
    dispatch.replica = "short"
    view.sent(dispatch, decision)
    assert dispatch.num_uncached_tokens == 5 * SIZE + 1
    view.ended(dispatch)
    view.routing.states_stored("whole", PROMPT[-1:])
    assert view.choose(dispatch_of(PROMPT, 10 * SIZE + 1), ["whole", "short"]).replica == "whole"


def test_a_replica_without_states_is_priced_by_its_blocks() -> None:
    view = make_view(attention=None, hybrid=[PROMPT[3]])
    for name in ("attention", "hybrid"):
        view.routing.stored(name, PROMPT)
    assert cached(view) == {"attention": 10, "hybrid": 4}
    view.routing.states_removed("hybrid", [PROMPT[3]])
    assert cached(view) == {"attention": 10}


def test_a_hit_ends_before_the_last_token() -> None:
    view = make_view(a=[PROMPT[3], PROMPT[9]], b=[PROMPT[9]])
    for name in "ab":
        view.routing.stored(name, PROMPT)
    assert cached(view, 10 * SIZE + 1) == {"a": 10, "b": 10}
    assert cached(view, 10 * SIZE) == {"a": 4}
    assert cached(view, 0) == {}


def test_a_state_after_the_cached_chain_is_worth_nothing() -> None:
    view = make_view(a=[PROMPT[1], PROMPT[7]])
    view.routing.stored("a", PROMPT[:5])
    assert cached(view) == {"a": 2}


def test_a_prompt_that_was_just_sent_counts_until_events_say_where_it_resumes() -> None:
    """Otherwise a burst of one new prompt would be spread over all replicas."""
    view = make_view(a=[], b=[])
    send(view, "a", PROMPT, 10 * SIZE + 1)
    assert cached(view) == {"a": 10}
    view.routing.stored("a", PROMPT)
    assert cached(view) == {}
    view.routing.states_stored("a", PROMPT[-1:])
    assert cached(view) == {"a": 10}


def test_without_events_the_cache_is_estimated_as_for_other_models() -> None:
    view = make_view(a=[PROMPT[2]])
    view.routing.stored("a", PROMPT)
    assert cached(view) == {"a": 3}
    view.routing.events_lost("a")
    assert cached(view) == {"a": 10}
    view.routing.replaced("a", PROMPT, [PROMPT[5]])
    assert cached(view) == {"a": 6}


def test_a_restarted_or_removed_replica_has_no_states() -> None:
    view = make_view(a=[PROMPT[2]], b=[PROMPT[2]])
    view.routing.cleared("a")
    view.routing.stored("a", PROMPT)
    assert cached(view) == {}, "its model still has states"
    assert view.routing.states.states("a") == frozenset()
    view.set_replicas({"a": {}})
    view.routing.states_stored("b", PROMPT)  # late
    assert view.routing.states.states("b") is None


def test_the_index_predicts_what_the_engine_resumes() -> None:
    """A prompt that continues another one, or leaves it, for every length."""
    view = make_view(a=[])
    engine, _ = make_engine(block_size=SIZE, num_slots=12, on_kv_events=lambda batch: batches.append(batch.events))
    batches: list[object] = []
    text = [token % 61 for token in range(5 * SIZE)]
    for length in (2 * SIZE + 3, 5 * SIZE):
        engine.add_request(EngineRequest("a", text[:length], SamplingParams(max_tokens=1)))
        run_to_end(engine)
    manager = engine.block_manager
    assert manager.states is not None
    view.routing.stored("a", manager.prefix_cache.published_hashes())
    view.routing.states_stored("a", blocks_with_state(manager))
    worths = set()
    for length in range(1, 5 * SIZE + 1):
        group = engine.add_request(EngineRequest("b", text[:length], SamplingParams(max_tokens=1)))
        (sequence,) = group.unfinished
        hashes = [sequence.block_hash(index, SIZE) for index in range(length // SIZE)]
        resumed = manager.match_prefix(sequence).num_resumed
        predicted = view.routing.num_cached_blocks(PromptBlocks(length, hashes, SIZE)).get("a", 0)
        assert predicted * SIZE == resumed
        worths.add(predicted)
        engine.abort("b")
    assert worths == {0, 2, 4}


@given(
    st.lists(st.tuples(st.integers(1, 12), st.none() | st.sets(st.integers(0, 14)), st.booleans()), max_size=5),
    st.integers(0, 12),
)
def test_the_worth_of_a_hit_is_that_of_a_walk_along_the_prompt(
    replicas: list[tuple[int, set[int] | None, bool]], max_blocks: int
) -> None:
    index, hashes, expected = StateIndex(), list(range(12)), {}
    for number, (num_cached, states, assumed) in enumerate(replicas):
        name = str(number)
        if states is not None:
            index.stored(name, range(20))
            index.removed(name, set(range(21)) - states)
        ends = [end for end in range(1, min(num_cached, max_blocks) + 1) if states is not None and end - 1 in states]
        worth = num_cached if states is None else min(num_cached, max_blocks) if assumed else max(ends, default=0)
        if worth:
            expected[name] = worth
    cached_blocks = {str(number): num_cached for number, (num_cached, _, _) in enumerate(replicas)}
    assumed_on = {str(number) for number, (_, _, assumed) in enumerate(replicas) if assumed}
    assert index.resumable(hashes, cached_blocks, max_blocks, lambda name, _: name in assumed_on) == expected
    for name in cached_blocks:
        index.remove_replica(name)
    assert not index
    assert index.resumable(hashes, cached_blocks, max_blocks, lambda *_: False) == cached_blocks
