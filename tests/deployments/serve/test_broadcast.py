"""Calls to every replica of a deployment."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from deployments.serve.broadcast import TIMEOUT_S, broadcast, first_result
from tests.virtual_clock import now, on_virtual_clock


@dataclass
class FakeResult:
    """One replica's answer: a value, an error, or none at all."""

    value: Any = None

    async def get_async(self) -> Any:
        if self.value is None:
            await asyncio.Event().wait()
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@dataclass
class FakeHandle:
    """A handle to replicas with these results; without replicas Serve raises."""

    results: list[FakeResult]

    def broadcast(self, method: str, *args: str) -> FakeHandle:
        assert (method, args) in (("metrics", ()), ("find", ("x",)))
        return self

    async def _fetch_replica_results_async(self) -> list[FakeResult]:
        if not self.results:
            raise RuntimeError("there is no replica")
        return self.results


@on_virtual_clock
async def test_replicas_that_fail_or_do_not_answer_are_left_out() -> None:
    results = [FakeResult(("a", 1)), FakeResult(RuntimeError("broken")), FakeResult(), FakeResult(("b", 2))]
    assert await broadcast(FakeHandle(results), "metrics") == {"a": 1, "b": 2}  # type: ignore[arg-type]
    assert now() == TIMEOUT_S


async def test_without_replicas_there_are_no_results() -> None:
    assert await broadcast(FakeHandle([]), "metrics") == {}  # type: ignore[arg-type]


@on_virtual_clock
async def test_the_first_result_is_not_delayed_by_other_replicas() -> None:
    results = [FakeResult(), FakeResult(("a", None)), FakeResult(RuntimeError("broken")), FakeResult(("b", 2))]
    assert await first_result(FakeHandle(results), "find", "x") == 2  # type: ignore[arg-type]
    assert now() == 0


@on_virtual_clock
async def test_no_replica_has_a_result() -> None:
    for results in ([FakeResult(("a", None)), FakeResult(RuntimeError("broken"))], [FakeResult()], []):
        assert await first_result(FakeHandle(results), "find", "x") is None  # type: ignore[arg-type]
