"""The pooling engine under AsyncEngine, with a runner that needs no model."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import pytest

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig, EngineInfo
from engine.errors import EngineDeadError, PromptTooLongError, RequestError
from engine.observability import metrics as m
from engine.outputs import EngineOutput, FinishReason
from engine.pooling.engine import PoolingEngine
from engine.pooling.info import PoolingInfo
from engine.pooling.model import Text
from engine.pooling.params import PoolingParams
from engine.request import EngineRequest
from tests.engine.observability.test_metrics import RecordingSink
from tests.waiting import HANG_S, until

INFO = EngineInfo(
    model="m",
    block_size=64,
    num_blocks=0,
    num_host_blocks=0,
    max_model_len=64,
    vocab_size=100,
    dtype="float32",
    device="cpu",
    attention_backend="packed",
    eos_token_ids=(),
    default_sampling={},
    pooling=PoolingInfo("embed", 2),
)


class SumRunner:
    """Returns the length and the sum of each text; waits for ``go`` if it is set."""

    def __init__(self, go: threading.Event | None = None) -> None:
        self.info = INFO
        self.batches: list[list[Text]] = []
        self._go = go

    def run(self, texts: Sequence[Text]) -> list[bytes]:
        self.batches.append(list(texts))
        if self._go is not None:
            assert self._go.wait(HANG_S)
        return [array("f", [len(text.token_ids), sum(text.token_ids)]).tobytes() for text in texts]

    def check_health(self) -> None:
        """It is always healthy."""


class Reader:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.outputs: SimpleQueue[tuple[Any, EngineOutput]] = SimpleQueue()
        self.failures: dict[Any, Exception] = {}
        self.ended: list[Any] = []

    def publish(self, tags: list[Any], token_ids: list[int], others: list[tuple[Any, EngineOutput]]) -> None:
        assert not tags
        for item in others:
            self.outputs.put(item)

    def fail(self, tag: Any, error: Exception) -> None:
        self.failures[tag] = error

    def end(self, tag: Any) -> None:
        self.ended.append(tag)


def text(name: str, token_ids: list[int], **options: Any) -> EngineRequest:
    return EngineRequest(name, token_ids, pooling=PoolingParams(), **options)


def build(runner: SumRunner, sink: RecordingSink | None = None, **options: Any) -> PoolingEngine:
    return PoolingEngine(EngineConfig(model="m", **options), runner, sink)


async def test_texts_of_one_batch_get_their_own_results() -> None:
    go = threading.Event()
    runner, sink, reader = SumRunner(go), RecordingSink(), Reader()
    engine = AsyncEngine(build(runner, sink, max_num_batched_tokens=8))
    for name, ids in (("first", [1]), ("a", [1, 2]), ("b", [3, 4, 5]), ("c", [6, 7, 8, 9])):
        engine.submit(text(name, ids), reader, name)
    go.set()
    results = dict(reader.outputs.get(timeout=HANG_S) for _ in range(4))
    assert {name: array("f", output.pooled or b"").tolist() for name, output in results.items()} == {
        "first": [1, 1],
        "a": [2, 3],
        "b": [3, 12],
        "c": [4, 30],
    }
    assert all(output.is_last and output.finish_reason is FinishReason.STOP for output in results.values())
    assert all(sum(len(item.token_ids) for item in batch) <= 8 for batch in runner.batches)
    assert (await engine.block_map()).num_blocks == 0
    await engine.shutdown()
    assert sink.counters[m.PROMPT_TOKENS] == 10
    assert sink.counters[m.REQUESTS_FINISHED, "stop"] == 4
    (labels,) = [key for key in sink.gauges if isinstance(key, tuple) and key[0] is m.ENGINE_INFO]
    assert labels[-1] == "embed"


async def test_an_aborted_text_is_not_computed() -> None:
    go = threading.Event()
    runner, sink, reader = SumRunner(go), RecordingSink(), Reader()
    engine = AsyncEngine(build(runner, sink))
    engine.submit(text("running", [1]), reader, "running")
    until(lambda: runner.batches, "the first batch runs")
    engine.submit(text("gone", [2]), reader, "gone")
    engine.submit(text("kept", [3]), reader, "kept")
    engine.abort("gone")
    go.set()
    assert [reader.outputs.get(timeout=HANG_S)[0] for _ in range(2)] == ["running", "kept"]
    assert reader.ended == ["gone"]
    assert not engine.load().num_waiting
    await engine.shutdown()
    assert sink.counters[m.REQUESTS_FINISHED, "abort"] == 1


async def test_a_full_queue_rejects_the_least_important_text() -> None:
    go = threading.Event()
    runner, reader = SumRunner(go), Reader()
    engine = AsyncEngine(build(runner, max_queued_requests=1))
    engine.submit(text("running", [1]), reader, "running")
    until(lambda: runner.batches, "the first batch runs")
    engine.submit(text("waiting", [2]), reader, "waiting")
    engine.submit(text("too many", [3]), reader, "too many")
    engine.submit(text("urgent", [4], priority=1), reader, "urgent")
    go.set()
    assert [reader.outputs.get(timeout=HANG_S)[0] for _ in range(2)] == ["running", "urgent"]
    assert set(reader.failures) == {"too many", "waiting"}
    await engine.shutdown()


async def test_a_failing_model_ends_the_engine_and_every_text() -> None:
    class Broken(SumRunner):
        def run(self, texts: Sequence[Text]) -> list[bytes]:
            raise RuntimeError("no memory")

    reader = Reader()
    engine = AsyncEngine(build(Broken()))
    engine.submit(text("a", [1]), reader, "a")
    until(lambda: reader.failures, "the text fails")
    with pytest.raises(EngineDeadError, match="no memory"):
        engine.check_health()
    await engine.shutdown()


def test_a_result_that_is_not_finite_ends_as_an_error() -> None:
    class NotFinite(SumRunner):
        def run(self, texts: Sequence[Text]) -> list[bytes]:
            return [array("f", [1.0, float("nan")]).tobytes() for _ in texts]

    sink = RecordingSink()
    engine = build(NotFinite(), sink)
    engine.queue_request(text("a", [1]))
    (output,) = engine.step()
    assert (output.finish_reason, output.pooled) == (FinishReason.ABORT, None)
    assert "not finite" in str(output.stop_reason)
    assert sink.counters[m.REQUESTS_FINISHED, "error"] == 1


def test_what_can_never_be_computed_is_rejected() -> None:
    engine = build(SumRunner())
    engine.check_request(text("a", [1] * 64))
    for request, kind, message in (
        (text("a", [1] * 65), PromptTooLongError, "has 65 tokens, but the context of 'm' holds 64"),
        (text("a", []), RequestError, "is empty"),
        (text("a", [100]), RequestError, "has the id 100"),
        (EngineRequest("a", [1]), RequestError, "asks for generated text"),
    ):
        with pytest.raises(kind, match=message):
            engine.check_request(request)


def test_the_speed_is_measured() -> None:
    engine = build(SumRunner())
    assert engine.meter.load().prefill_tokens_per_s == 0
    engine.queue_request(text("a", [1] * 10))
    assert engine.meter.load().queued_prefill_tokens == 10
    list(engine.step())
    load = engine.meter.load()
    assert load.prefill_tokens_per_s > 0
    assert (load.num_waiting, load.queued_prefill_tokens, load.num_steps) == (0, 0, 1)
