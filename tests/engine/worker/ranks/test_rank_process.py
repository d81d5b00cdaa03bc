"""What a rank's process answers to rank 0; here in the test's own process, with a worker that computes nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import pytest
import torch

from engine.errors import ModelLoadError
from engine.worker.ranks import rank_process
from engine.worker.ranks.remote_ranks import RankFailure

Served = Callable[..., list[Any]]


class Worker:
    """Remembers what it was asked to do."""

    def __init__(self, config: str, rank: int, host: str) -> None:
        self.calls: list[Any] = [config, rank, host]

    def note(self, value: int) -> list[Any]:
        self.calls.append(value)
        return self.calls

    def fail(self, error: Exception) -> None:
        raise error


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """Return a function that runs rank 3 on messages, the last of which ends it, and returns its replies."""
    monkeypatch.setattr(rank_process, "ModelWorker", Worker)
    monkeypatch.setattr(rank_process, "_end_with_parent", lambda *_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the test's own Ctrl-C stays
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)

    def run(*calls: Any) -> list[Any]:
        ours, theirs = Pipe()
        for message in (("config", 1), *calls):
            ours.send(message)
        with ours, theirs:
            rank_process.main(3, os.dup(theirs.fileno()), 1, "")  # which closes it
            replies = []
            while ours.poll():
                replies.append(ours.recv())
            return replies

    return run


def test_calls_are_answered_in_order_if_an_answer_is_wanted(served: Served) -> None:
    calls = [("note", (7,), True), ("note", (8,), False), ("note", (9,), True), ("fail", (ValueError("x"),), False)]
    started, first, second, _ = served(*calls)
    assert started == (None, None)
    assert first == (["config", 3, "", 7], None)
    assert second == (["config", 3, "", 7, 8, 9], None)


@pytest.mark.parametrize(("error", "is_typed"), [(ValueError("bad"), False), (ModelLoadError("bad"), True)])
def test_an_error_is_reported_with_its_type_if_it_is_one_of_ours(
    served: Served, error: Exception, is_typed: bool
) -> None:
    *_, (result, failure) = served(("fail", (error,), True))
    assert result is None
    assert isinstance(failure, RankFailure)
    assert failure.message == f"{type(error).__name__}: bad"
    assert (type(failure.error) is type(error), failure.error is None) == (is_typed, not is_typed)
    assert "in fail" in failure.traceback
