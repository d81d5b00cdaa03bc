"""The figures of the benchmark of failovers, from streams and kills."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import failover
from benchmarks.failover import Answer, Watch, interrupted_gaps


def test_the_gap_of_a_stream_is_the_one_around_the_kill() -> None:
    answer = Answer(0, "a", arrivals=[1.0, 2.0, 5.0, 5.5])
    assert answer.gap_at(3.0) == 3.0
    assert answer.gap_at(5.2) == 0.5
    assert answer.gap_at(0.5) is None, "it had not begun"
    assert answer.gap_at(6.0) is None, "it had ended"


def test_only_streams_of_killed_engines_are_interrupted() -> None:
    answers = [Answer(0, "a", arrivals=[1.0, 4.0]), Answer(1, "b", arrivals=[1.0, 9.0]), Answer(2, "c")]
    assert interrupted_gaps(answers, {"a": 2.0, "c": 2.0}) == [3.0]


def test_what_an_engine_has_restored_counts_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[dict[str, int]] = [{"a": 3, "b": 1}, {"b": 2}, {"a": 4}, {"a": 4, "c": 0}]

    class Reply:
        def __init__(self, counts: dict[str, int]) -> None:
            lines = [f'pagoda_resumed_tokens_total{{kv="restored",replica="{name}"}} {n}' for name, n in counts.items()]
            self._body = "\n".join(["# TYPE pagoda_resumed_tokens counter", *lines, ""]).encode()

        def __enter__(self) -> Reply:
            return self

        def __exit__(self, *args: object) -> None:
            """Nothing is open."""

        def read(self) -> bytes:
            return self._body

    def open_next(*args: Any, **options: Any) -> Reply:
        return Reply(texts.pop(0))

    monkeypatch.setattr(failover, "direct_urlopen", open_next)
    watch = Watch("http://127.0.0.1:1")
    while texts:
        watch.read()
    assert (watch.tokens("restored"), watch.tokens("recomputed")) == (6, 0)
