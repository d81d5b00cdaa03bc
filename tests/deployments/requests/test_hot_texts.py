"""What replicas copy when one leaves or joins, by the prompts that an ingress has sent."""

from __future__ import annotations

import pytest

from deployments.requests import hot_texts
from deployments.requests.hot_texts import HotTexts
from deployments.transport.request_channel.dispatch import Dispatch
from engine.kv.prefix_hash import hash_blocks
from engine.kv.tiers.copies import CopyOrder
from engine.request import EngineRequest, KVSource
from tests.deployments.routing.test_sources import endpoint, metadata, paged_view
from tests.deployments.routing.views import BLOCK_SIZE, View

Sent = list[tuple[str, CopyOrder]]


@pytest.fixture
def view() -> View:
    return paged_view("abc")


@pytest.fixture
def sent() -> Sent:
    return []


@pytest.fixture
def texts(view: View, sent: Sent) -> HotTexts:
    return HotTexts(view, lambda replica, order: sent.append((replica, order)))


def ask(texts: HotTexts, view: View, prompt: list[int], replica: str) -> list[int]:
    """Send a prompt to a replica, which computes it; return its hashes."""
    hashes = hash_blocks(prompt, BLOCK_SIZE, 1)
    texts.sent(Dispatch(EngineRequest("id", prompt), hashes, replica=replica))
    view.routing.stored(replica, hashes)
    return hashes


def prompt_of(number: int, length: int = 4 * BLOCK_SIZE + 1) -> list[int]:
    return [number] * length


def source(name: str, num_tokens: int) -> KVSource:
    return KVSource(endpoint(name), f"secret of {name}", num_tokens)


def test_what_only_the_leaving_replica_holds_is_copied_the_latest_first(
    texts: HotTexts, view: View, sent: Sent
) -> None:
    for number in range(3):
        ask(texts, view, prompt_of(number), "a")
    ask(texts, view, prompt_of(3), "b")
    view.routing.stored("c", hash_blocks(prompt_of(1), BLOCK_SIZE, 1))
    view.set_replicas(metadata("bc"))
    texts.replica_left("a", metadata("a")["a"], ["b", "c"])
    assert [order.token_ids[0] for _, order in sent] == [2, 0]
    assert {order.reason for _, order in sent} == {"drain"}
    assert {order.source for _, order in sent} == {source("a", 4 * BLOCK_SIZE + 1)}
    assert {replica for replica, _ in sent} <= {"b", "c"}


def test_a_neighbour_that_holds_much_of_a_text_copies_the_rest(texts: HotTexts, view: View, sent: Sent) -> None:
    long = list(range(40 * BLOCK_SIZE))
    hashes = ask(texts, view, long, "a")
    view.routing.stored("c", hashes[:30])
    view.set_replicas(metadata("bc"))
    texts.replica_left("a", metadata("a")["a"], ["b", "c"])
    assert [replica for replica, _ in sent] == ["c"]


def test_what_is_copied_and_kept_is_bounded(
    texts: HotTexts, view: View, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(prompt_of(0))
    monkeypatch.setattr(hot_texts, "MAX_KEPT_TOKENS", 5 * size)
    monkeypatch.setattr(hot_texts, "MAX_COPIED_TOKENS", 2 * size)
    for number in range(9):
        ask(texts, view, prompt_of(number), "a")
        ask(texts, view, prompt_of(number), "a")  # again
    assert len(texts._texts) == 5
    view.set_replicas(metadata("bc"))
    texts.replica_left("a", metadata("a")["a"], ["b", "c"])
    assert [order.token_ids[0] for _, order in sent] == [8, 7]


def test_without_a_neighbour_or_pages_nothing_is_copied(texts: HotTexts, view: View, sent: Sent) -> None:
    ask(texts, view, prompt_of(0), "a")
    view.set_replicas(metadata("bc"))
    texts.replica_left("a", metadata("a")["a"], [])
    texts.replica_left("a", {}, ["b", "c"])
    view.set_replicas({name: {} for name in "bc"})
    texts.replica_left("a", metadata("a")["a"], ["b", "c"])
    assert sent == []


def test_a_new_replica_copies_shared_prefixes_the_most_used_first(texts: HotTexts, view: View, sent: Sent) -> None:
    for number in range(3):
        ask(texts, view, [*prompt_of(7), *[7] * (BLOCK_SIZE - 1), *prompt_of(number)], "a")  # five blocks are shared
    for _ in range(2):
        ask(texts, view, prompt_of(8), "b")
    ask(texts, view, prompt_of(9), "b")  # it was used once
    view.set_replicas(metadata("abcd"))
    texts.replica_joined("d")
    shared = 5 * BLOCK_SIZE
    assert [(replica, order.reason) for replica, order in sent] == [("d", "warm_up")] * 2
    assert [order.source for _, order in sent] == [source("a", shared), source("b", 4 * BLOCK_SIZE)]
    assert [len(order.token_ids) for _, order in sent] == [shared + 1, 4 * BLOCK_SIZE + 1]


def test_a_prefix_that_no_other_replica_holds_now_is_not_copied(texts: HotTexts, view: View, sent: Sent) -> None:
    for _ in range(2):
        hashes = ask(texts, view, prompt_of(8), "b")
    view.routing.removed("b", hashes[3:])
    texts.replica_joined("a")
    assert sent == []


def test_the_turns_of_a_conversation_are_one_text(
    texts: HotTexts, view: View, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [list(range(turn * 4 * BLOCK_SIZE + 1)) for turn in (1, 2, 3)]
    monkeypatch.setattr(hot_texts, "MAX_COPIED_TOKENS", 16 * BLOCK_SIZE)
    ask(texts, view, prompt_of(7), "a")  # it would not be copied if each turn were charged
    for turn in turns:
        ask(texts, view, turn, "a")
    assert [text.token_ids for text in texts._texts.values()] == [prompt_of(7), turns[-1]]
    assert texts._num_tokens == len(prompt_of(7)) + len(turns[-1])
    view.set_replicas(metadata("bc"))
    texts.replica_left("a", metadata("a")["a"], ["b", "c"])
    assert [order.token_ids for _, order in sent] == [turns[-1], prompt_of(7)]


def test_what_the_turns_share_is_used_several_times_and_the_last_turn_once(
    texts: HotTexts, view: View, sent: Sent
) -> None:
    for num_blocks in (2, 4, 6):
        ask(texts, view, list(range(num_blocks * BLOCK_SIZE + 1)), "a")
    view.set_replicas(metadata("abcd"))
    texts.replica_joined("d")
    assert [order.source.num_tokens for _, order in sent] == [4 * BLOCK_SIZE]


def test_only_what_a_neighbour_lacks_is_charged(
    texts: HotTexts, view: View, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_texts, "MAX_COPIED_TOKENS", 30 * BLOCK_SIZE)
    shared = [7] * (20 * BLOCK_SIZE)
    for number in range(3):
        ask(texts, view, [*shared, *prompt_of(number)], "a")
    held = ask(texts, view, prompt_of(8, 20 * BLOCK_SIZE), "a")
    view.routing.stored("c", held)  # the latest text costs nothing
    view.set_replicas(metadata("bc"))
    texts.replica_left("a", metadata("a")["a"], ["c"])
    assert [order.token_ids[-1] for _, order in sent] == [2, 1]  # 24 blocks and 4


def test_a_shared_prefix_is_ordered_and_charged_once(
    texts: HotTexts, view: View, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_texts, "MAX_COPIED_TOKENS", 12 * BLOCK_SIZE)
    system = [7] * (8 * BLOCK_SIZE)
    for number in range(4):  # the first two are asked twice
        for _ in range(2 if number < 2 else 1):
            ask(texts, view, [*system, *prompt_of(number, 2 * BLOCK_SIZE)], "a")
    view.set_replicas(metadata("abcd"))
    texts.replica_joined("d")
    assert [order.source.num_tokens for _, order in sent] == [8 * BLOCK_SIZE, 10 * BLOCK_SIZE, 10 * BLOCK_SIZE]


def test_a_prompt_that_a_replica_has_returned_is_used_once(texts: HotTexts, view: View, sent: Sent) -> None:
    hashes = hash_blocks(prompt_of(8), BLOCK_SIZE, 1)
    dispatch = Dispatch(EngineRequest("id", prompt_of(8)), hashes, replica="a")
    texts.sent(dispatch)
    dispatch.replica = "b"
    texts.sent(dispatch, is_repeat=True)
    view.routing.stored("b", hashes)
    view.set_replicas(metadata("abcd"))
    texts.replica_joined("d")
    assert sent == []
    texts.replica_left("b", metadata("b")["b"], ["c"])
    assert [replica for replica, _ in sent] == ["c"]
