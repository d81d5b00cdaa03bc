"""ResponseStore: bounded in number, bytes and time."""

from __future__ import annotations

from deployments.api.responses.store import ResponseStore, StoredResponse


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def stored(num_bytes: int = 1) -> StoredResponse:
    return StoredResponse(b"x" * num_bytes, b"[]")


def kept(store: ResponseStore, *ids: str) -> list[str]:
    return [response_id for response_id in ids if store.get(response_id) is not None]


def test_a_response_is_kept_and_deleted_once() -> None:
    store = ResponseStore(10, 10**6, 60.0)
    response = stored()
    store.put("a", response)
    assert store.get("a") is response
    assert store.get("b") is None
    assert store.delete("a")
    assert not store.delete("a")
    assert store.get("a") is None


def test_the_oldest_ones_go_beyond_the_number() -> None:
    store = ResponseStore(2, 10**6, 60.0)
    for response_id in "abc":
        store.put(response_id, stored())
    assert kept(store, *"abc") == ["b", "c"]


def test_the_oldest_ones_go_beyond_the_bytes() -> None:
    each = stored(1000).num_bytes
    store = ResponseStore(100, 3 * each, 60.0)
    for response_id in "abcd":
        store.put(response_id, stored(1000))
    assert kept(store, *"abcd") == ["b", "c", "d"]
    store.delete("c")
    store.put("e", stored(1000))
    assert kept(store, *"bcde") == ["b", "d", "e"]
    store.put("e", stored(1000))  # again: it counts once
    assert kept(store, *"bde") == ["b", "d", "e"]
    store.put("f", stored(2 * each))
    assert kept(store, *"bdef") == ["f"]


def test_output_items_are_found_as_long_as_their_response_is_kept() -> None:
    store = ResponseStore(2, 10**6, 60.0)
    for letter in "abc":
        response = b'{"output": [{"id": "%s1"}, {"id": "%s2"}]}' % (letter.encode(), letter.encode())
        store.put(letter, StoredResponse(response, b"[]", (f"{letter}1", f"{letter}2")))
    assert store.items(["a1", "b2", "c1", "x"]) == {"b2": {"id": "b2"}, "c1": {"id": "c1"}}
    store.delete("b")
    assert store.items(["b1", "b2"]) == {}


def test_one_that_is_too_large_is_not_kept_and_drops_no_other() -> None:
    store = ResponseStore(100, 5000, 60.0)
    store.put("a", stored())
    store.put("b", stored(5000))
    assert kept(store, "a", "b") == ["a"]


def test_responses_expire() -> None:
    clock = Clock()
    store = ResponseStore(100, 10**6, 60.0, clock)
    store.put("a", stored())
    clock.now = 30.0
    store.put("b", stored())
    clock.now = 59.9
    assert kept(store, "a", "b") == ["a", "b"]
    clock.now = 60.0
    assert kept(store, "a", "b") == ["b"]
    clock.now = 90.0
    assert not store.delete("b")


def test_none_are_kept_without_room() -> None:
    store = ResponseStore(0, 10**6, 60.0)
    store.put("a", stored())
    assert store.get("a") is None
