"""The queue of texts: every text is computed once, in turns and by priority, within the limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import OverloadedError
from engine.pooling.queue import TextQueue
from engine.request import EngineRequest


def request(name: str, length: int = 4, *, client: str = "", priority: int = 0) -> EngineRequest:
    return EngineRequest(name, [7] * length, client=client, priority=priority)


def names(queue: TextQueue, max_tokens: int = 10**6, max_texts: int = 10**6) -> list[str]:
    return [text.request.request_id for text in queue.next_batch(max_tokens, max_texts)]


def test_a_batch_has_as_many_texts_as_fit_and_at_least_one() -> None:
    queue = TextQueue(None, None)
    for name, length in (("a", 20), ("b", 3), ("c", 4), ("d", 4)):
        queue.add(request(name, length), 0.0)
    assert names(queue, max_tokens=10) == ["a"]
    assert names(queue, max_tokens=8) == ["b", "c"]
    assert (len(queue), queue.num_tokens) == (1, 4)


def test_clients_take_turns() -> None:
    """A text of a second client does not wait for all texts of the first one."""
    queue = TextQueue(None, None)
    for index in range(100):
        queue.add(request(f"many{index}", client="many"), 0.0)
    assert names(queue, max_texts=10) == [f"many{index}" for index in range(10)]
    queue.add(request("one", client="one"), 0.0)
    queue.add(request("two", client="one"), 0.0)
    following = names(queue, max_texts=5)
    assert {"one", "two"} < set(following)


def test_higher_priorities_go_first_and_push_out_lower_ones() -> None:
    queue = TextQueue(3, None)
    for name, priority in (("a", 0), ("b", -1), ("c", 0)):
        queue.add(request(name, priority=priority), 0.0)
    with pytest.raises(OverloadedError, match="3 texts with 12 tokens wait already"):
        queue.add(request("low", priority=-1), 0.0)
    rejected = queue.add(request("high", priority=5), 0.0)
    assert [text.request.request_id for text in rejected] == ["b"]
    assert names(queue) == ["high", "a", "c"]


def test_the_limit_of_tokens_lets_a_single_text_of_any_length_wait() -> None:
    queue = TextQueue(None, 10)
    queue.add(request("long", 50), 0.0)
    with pytest.raises(OverloadedError):
        queue.add(request("a", 1), 0.0)
    assert names(queue) == ["long"]
    queue.add(request("a", 9), 0.0)
    with pytest.raises(OverloadedError):
        queue.add(request("b", 2), 0.0)
    queue.add(request("c", 1), 0.0)


OPERATION = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 30), st.sampled_from("xyz"), st.integers(-1, 1)),
    st.tuples(st.just("take"), st.integers(1, 40), st.integers(1, 5), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 60), st.just(0), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATION, max_size=60))
def test_every_text_leaves_exactly_once(operations: list[tuple[str, int, object, int]]) -> None:
    """A list is the shadow model: what was added and has neither been taken, aborted nor rejected still waits."""
    queue = TextQueue(12, 150)
    waiting: dict[str, EngineRequest] = {}
    for number, (kind, size, other, priority) in enumerate(operations):
        if kind == "add":
            added = request(f"{number}", size, client=str(other), priority=priority)
            try:
                rejected = queue.add(added, 0.0)
            except OverloadedError:
                assert waiting
            else:
                for text in rejected:
                    assert waiting.pop(text.request.request_id).priority < priority
                waiting[added.request_id] = added
        elif kind == "abort":
            known = queue.remove(str(size))
            assert (known is not None) == (waiting.pop(str(size), None) is not None)
        else:
            assert isinstance(other, int)
            batch = [text.request for text in queue.next_batch(size, other)]
            assert len(batch) <= other
            assert bool(batch) == bool(waiting)
            assert len(batch) == 1 or sum(len(taken.prompt_token_ids) for taken in batch) <= size
            for taken in batch:
                assert waiting.pop(taken.request_id) is taken
                assert all(taken.priority >= left.priority for left in waiting.values())
        assert len(queue) == len(waiting)
        assert queue.num_tokens == sum(len(left.prompt_token_ids) for left in waiting.values())
    assert len(queue.next_batch(10**6, 10**6)) == len(waiting)
