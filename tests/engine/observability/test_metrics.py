"""The engine's metrics, read from a sink that records everything."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import pytest

import engine.engine
from engine.engine import Engine
from engine.errors import RequestError
from engine.observability import engine_metrics
from engine.observability import metrics as m
from engine.observability.engine_metrics import EngineMetrics
from engine.observability.metrics import METRICS, Metric
from engine.outputs import FinishReason
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.drafting.proposer import Proposer
from engine.scheduling.scheduler_output import SampledTokens
from engine.sequence import Sequence
from tests.engine.shadow import make_engine, run_all_to_end, run_to_end
from tests.engine.shadow_model import ShadowProposer


class RecordingSink:
    """Keeps counters as sums, gauges as last values and histograms as lists, by metric and label values."""

    def __init__(self) -> None:
        self.counters: defaultdict[Any, float] = defaultdict(float)
        self.gauges: dict[Any, float] = {}
        self.histograms: defaultdict[Any, list[float]] = defaultdict(list)

    def _key(self, metric: Metric, labels: dict[str, str]) -> Any:
        assert metric in METRICS
        assert set(labels) == set(metric.labels)
        return (metric, *labels.values()) if labels else metric

    def increment(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        assert metric.kind == "counter"
        assert amount > 0
        self.counters[self._key(metric, labels)] += amount

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        assert metric.kind == "gauge"
        self.gauges[self._key(metric, labels)] = value

    def observe(self, metric: Metric, value: float, count: int = 1, **labels: str) -> None:
        assert metric.kind == "histogram"
        self.histograms[self._key(metric, labels)] += [value] * count


class Clock:
    """A clock that each step of the engine advances by one second."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(engine_metrics, "monotonic", clock)
    monkeypatch.setattr(engine.engine, "monotonic", clock)
    finished = EngineMetrics.step_finished

    def tick_then_finish(*args: Any) -> None:
        clock.now += 1.0
        finished(*args)

    monkeypatch.setattr(EngineMetrics, "step_finished", tick_then_finish)
    return clock


def start(**options: Any) -> tuple[Engine, RecordingSink]:
    sink = RecordingSink()
    return make_engine(sink=sink, **options)[0], sink


def test_names_are_unique_and_histograms_have_rising_buckets() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS) > 20
    for metric in METRICS:
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_latencies_of_one_request(clock: Clock) -> None:
    engine, sink = start(max_num_batched_tokens=4)
    engine.add_request(EngineRequest("a", [1] * 10, SamplingParams(max_tokens=3)))
    clock.now += 5.0  # waits before its first step
    run_to_end(engine)  # 3 steps of prefill, 2 of decode, a second each
    assert sink.histograms[m.QUEUE_TIME] == [5.0]
    assert sink.histograms[m.PREFILL_TIME] == [3.0]
    assert sink.histograms[m.TTFT] == [8.0]
    assert sink.histograms[m.INTER_TOKEN] == [1.0, 1.0]
    assert sink.histograms[m.DECODE_TIME] == [2.0]
    assert sink.histograms[m.E2E_LATENCY] == [10.0]
    assert sink.histograms[m.REQUEST_PROMPT] == [10]
    assert sink.histograms[m.REQUEST_GENERATION] == [3]
    assert sink.histograms[m.STEP_TOKENS] == [4, 4, 2, 1, 1]
    assert len(sink.histograms[m.STEP_SECONDS, "forward"]) == 5


def test_every_stream_of_a_step_has_its_interval(clock: Clock) -> None:
    engine, sink = start()
    for number in range(5):
        engine.add_request(EngineRequest(str(number), [number] * 3, SamplingParams(max_tokens=4)))
    run_to_end(engine)
    assert sink.histograms[m.INTER_TOKEN] == [1.0] * 15


def test_tokens_cache_hits_and_reasons() -> None:
    engine, sink = start(block_size=4)
    for name in ("a", "b"):
        engine.add_request(EngineRequest(name, list(range(11)), SamplingParams(max_tokens=5)))
        run_to_end(engine)
    engine.add_request(EngineRequest("aborted", [9], SamplingParams()))
    engine.abort("aborted")
    engine.add_request(EngineRequest("stopped", [9], SamplingParams(max_tokens=9)))
    engine.step()
    engine.abort("stopped", FinishReason.STOP)
    assert sink.counters[m.PROMPT_TOKENS] == sink.counters[m.CACHE_QUERIES] == 23
    assert sink.counters[m.CACHE_HITS] == 8  # two full blocks of the second request
    assert sink.counters[m.GENERATION_TOKENS] == 11
    reasons = {key[1]: count for key, count in sink.counters.items() if isinstance(key, tuple)}
    assert reasons == {"length": 2, "abort": 1, "stop": 1}
    assert len(sink.histograms[m.E2E_LATENCY]) == 3  # the aborted one never got a token


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("end", ["abort", "end_sequence"])
def test_an_answer_that_ends_while_its_step_is_in_flight_has_the_tokens_that_were_output(
    end: str, num_steps: int
) -> None:
    engine, sink = start(async_scheduling=True)
    engine.add_request(EngineRequest("a", [1, 2, 3], SamplingParams(max_tokens=30)))
    num_tokens = sum(len(output.token_ids) for _ in range(num_steps) for output in engine.step())
    assert num_tokens == num_steps - 1
    assert engine.abort("a") if end == "abort" else engine.end_sequence("a", 0)
    run_to_end(engine)
    assert sink.histograms[m.REQUEST_GENERATION] == [num_tokens]
    assert sink.counters[m.GENERATION_TOKENS] == num_tokens


def test_one_of_several_answers_that_ends_in_flight_has_the_tokens_that_were_output() -> None:
    engine, sink = start(async_scheduling=True)
    engine.add_request(EngineRequest("a", [1, 2, 3], SamplingParams(n=3, max_tokens=6)))
    num_tokens = sum(len(output.token_ids) for _ in range(3) for output in engine.step())
    assert engine.end_sequence("a", 1)
    num_tokens += sum(map(len, run_all_to_end(engine).values()))
    assert num_tokens == 2 + 6 + 6
    assert sink.histograms[m.REQUEST_GENERATION] == [num_tokens]
    assert sink.counters[m.GENERATION_TOKENS] == num_tokens


def test_a_request_that_fails_is_not_counted_as_one_whose_client_went_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sink = RecordingSink()
    engine, runner = make_engine(sink=sink)
    engine.add_request(EngineRequest("a", [1, 2, 3], SamplingParams(max_tokens=4)))
    engine.step()
    monkeypatch.setattr(runner, "run", lambda output, times: SampledTokens([0], failed={0: "no choice"}))
    run_to_end(engine)
    assert {key[1]: count for key, count in sink.counters.items() if isinstance(key, tuple)} == {"error": 1}


def test_an_engine_says_what_it_is_and_since_when() -> None:
    for options, name in (({}, "shadow"), ({"served_model_name": "poet"}, "poet")):
        before = time.time()
        engine, sink = start(**options)
        (labels,) = [key[1:] for key in sink.gauges if isinstance(key, tuple) and key[0] is m.ENGINE_INFO]
        sizes = str(engine.info.block_size), str(engine.info.num_blocks)
        assert labels == (name, *sizes, "none", "float32", "auto", "generate")
        assert before <= sink.gauges[m.ENGINE_START_TIME] <= time.time()


def test_a_resumed_request_aborted_before_a_token_of_ours_has_no_latency() -> None:
    """Its latency was once counted from arrival back to the clock's zero."""
    engine, sink = start()
    engine.queue_request(EngineRequest("a", [1, 2, 3], SamplingParams(max_tokens=50), output_token_ids=[4, 5]))
    engine.abort("a")
    assert sink.counters[m.REQUESTS_FINISHED, "abort"] == 1
    assert not sink.histograms[m.E2E_LATENCY]
    assert not sink.histograms[m.DECODE_TIME]


def test_blocks_and_sequences_by_state() -> None:
    engine, sink = start(num_blocks=10, block_size=4, max_num_seqs=2)
    for name in ("a", "b", "c"):
        engine.add_request(EngineRequest(name, list(range(9)), SamplingParams(max_tokens=5)))
    engine.step()
    assert sink.gauges[m.REQUESTS_RUNNING] == 2
    assert sink.gauges[m.REQUESTS_WAITING] == 1
    assert sink.gauges[m.KV_BLOCKS, "used"] == 4  # two shared full ones, one that is not full each
    assert sink.gauges[m.KV_BLOCKS, "shared"] == 2
    assert sink.gauges[m.KV_USAGE] == 0.4
    run_to_end(engine)
    assert sink.gauges[m.REQUESTS_RUNNING] == sink.gauges[m.REQUESTS_WAITING] == sink.gauges[m.KV_USAGE] == 0
    assert sink.gauges[m.KV_CACHED] == sink.gauges[m.KV_BLOCKS, "cached"] / 10 > 0


def test_pages_of_windows_and_states_of_recurrent_layers() -> None:
    engine, sink = start(block_size=4, windows=((8, 20),), num_slots=6)
    engine.add_request(EngineRequest("a", list(range(30)), SamplingParams(max_tokens=5)))
    engine.step()
    engine.step()
    used, slots = sink.gauges[m.WINDOW_PAGES, "8", "used"], sink.gauges[m.STATE_SLOTS, "used"]
    assert (used, slots, sink.gauges[m.STATE_SLOTS, "snapshot"]) == (3, 1, 1)
    run_to_end(engine)
    assert sink.gauges[m.WINDOW_PAGES, "8", "used"] == sink.gauges[m.STATE_SLOTS, "used"] == 0
    assert sink.gauges[m.WINDOW_PAGES, "8", "cached"] > 0
    assert sink.gauges[m.STATE_SLOTS, "free"] + sink.gauges[m.STATE_SLOTS, "snapshot"] == 6


def test_guessed_tokens_and_those_gained_by_them() -> None:
    engine, sink = start(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    engine.add_request(EngineRequest("a", [1, 2, 3, 1, 2, 3], SamplingParams(temperature=0, max_tokens=9)))
    run_to_end(engine)
    assert not sink.counters.keys() & {m.DRAFT_TOKENS, m.ACCEPTED_TOKENS}  # its tokens are new
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter.proposers = {"test": ShadowProposer(engine.runner.ids)}  # type: ignore[attr-defined]
    steps = len(sink.histograms[m.STEP_TOKENS])
    num_tokens = 0
    engine.add_request(EngineRequest("b", [1], SamplingParams(temperature=0, max_tokens=100)))
    while engine.has_unfinished:
        num_tokens += sum(len(output.token_ids) for output in engine.step())
    steps = len(sink.histograms[m.STEP_TOKENS]) - steps
    assert num_tokens == 100
    assert sink.counters[m.ACCEPTED_TOKENS, "test"] == num_tokens - steps > 10
    assert sink.counters[m.DRAFT_TOKENS, "test"] > sink.counters[m.ACCEPTED_TOKENS, "test"]
    assert steps >= sink.counters[m.DRAFTS, "test"] >= sink.counters[m.DRAFT_TOKENS, "test"] / 3 > 10
    assert sink.counters[m.GENERATION_TOKENS] == 109
    accepted, drafted = ([sink.counters[at, "test", str(i)] for i in (1, 2, 3)] for at in (m.ACCEPTED_AT, m.DRAFTED_AT))
    assert sum(accepted) == sink.counters[m.ACCEPTED_TOKENS, "test"] == sink.counters[m.SAVED_STEPS]
    assert sum(drafted) == sink.counters[m.DRAFT_TOKENS, "test"]
    assert drafted[0] == sink.counters[m.DRAFTS, "test"]
    assert accepted[0] >= accepted[1] >= accepted[2] > 0
    emitted = sink.counters[m.EMITTED_TOKENS, "test"]
    assert emitted == sink.counters[m.ACCEPTED_TOKENS, "test"] + sink.counters[m.DRAFTS, "test"]
    assert sink.counters[m.DRAFTING_SECONDS, "test"] > 0
    names = {f"pagoda_{metric.name}_total" for metric in (m.DRAFT_TOKENS, m.ACCEPTED_TOKENS)}
    assert names == {"pagoda_spec_decode_num_draft_tokens_total", "pagoda_spec_decode_num_accepted_tokens_total"}


class SomeTokens(Proposer):
    """Proposes as many tokens as it may."""

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        return [1] * limit


def test_positions_of_long_drafts_are_counted_together() -> None:
    engine, sink = start(speculative_config={"method": "ngram", "num_speculative_tokens": 30})
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter.proposers = {"test": SomeTokens()}
    engine.add_request(EngineRequest("a", [1], SamplingParams(temperature=0, max_tokens=33)))
    engine.step()
    keys = [key for key in sink.counters if isinstance(key, tuple) and key[0] == m.DRAFTED_AT]
    drafted = {position: sink.counters[at, drafter, position] for at, drafter, position in keys}
    assert drafted == dict.fromkeys(map(str, range(1, 9)), 1) | {"9-16": 8, "17+": 14}


def test_preemptions_evictions_and_prompts_counted_once() -> None:
    engine, sink = start(num_blocks=8, block_size=4)
    for i in range(4):
        engine.add_request(EngineRequest(str(i), [i] * 9, SamplingParams(max_tokens=20)))
    run_to_end(engine)
    assert sink.counters[m.PREEMPTIONS, "recompute"] > 0
    assert sink.counters[m.BLOCKS_EVICTED] == engine.block_manager.prefix_cache.num_evicted > 0
    assert sink.counters[m.PROMPT_TOKENS] == 36
    assert len(sink.histograms[m.QUEUE_TIME]) == len(sink.histograms[m.TTFT]) == 4


def test_refusals_are_counted_by_what_was_wrong() -> None:
    engine, sink = start()
    for prompt in ([], [999], [1] * 1000):
        with pytest.raises(RequestError):
            engine.add_request(EngineRequest("bad", prompt, SamplingParams()))
    assert sink.counters[m.REQUESTS_REJECTED, "prompt"] == 3
