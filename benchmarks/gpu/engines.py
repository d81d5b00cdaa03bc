"""Engines with random weights, and batches that decode: what the timed parts share."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from benchmarks.gpu.run.part_run import PartRun
from benchmarks.gpu.sizes import TokenLengths
from benchmarks.machine import release_memory, synchronize
from engine.engine import Engine
from engine.llm import LLM, RequestOutput
from engine.observability.observer import EngineObserver
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SchedulerOutput, StepTimes
from engine.sequence import Sequence

__all__ = ["StepRecorder", "decoding", "draw_lengths", "generate", "has_cache", "loaded", "random_ids", "timed_steps"]

FIRST_ID = 10  # smaller ids are special


@contextmanager
def loaded(part: PartRun, model: str, **options: Any) -> Iterator[LLM]:
    """Load a model of the sizes; its memory is free again afterwards. Prompts share no prefixes unless asked to."""
    defaults: dict[str, Any] = {
        "device": str(part.device),
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": part.sizes.max_num_batched_tokens,
        "kv_cache_memory": None if part.on_gpu else "64MiB",
    }
    llm = LLM(str(part.work / model), **(defaults | options))
    try:
        yield llm
    finally:
        llm.engine.close()
        del llm.engine  # the caller still holds the LLM
        release_memory(part.device)


def has_cache(part: PartRun, kv_cache_dtype: str) -> bool:
    """Return whether this device has caches of this dtype; record it if not."""
    if kv_cache_dtype == "auto" or part.on_gpu:
        return True
    part.record("skipped", f"kv_cache_dtype={kv_cache_dtype} runs on GPUs")
    return False


def random_ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    """Return ``count`` random token ids, none of them special."""
    return [rng.randrange(FIRST_ID, vocab_size) for _ in range(count)]


def draw_lengths(lengths: TokenLengths, seed: int) -> list[tuple[int, int]]:
    """Return each request's prompt tokens and output tokens."""
    rng = random.Random(seed)
    return [
        (rng.randint(*lengths.prompt_tokens), rng.randint(*lengths.output_tokens)) for _ in range(lengths.num_requests)
    ]


def generate(
    llm: LLM, prompts: list[list[int]], output_tokens: Iterable[int], *, temperature: float = 0.0
) -> list[RequestOutput]:
    """Generate exactly this number of tokens for each prompt."""
    params = [SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True) for count in output_tokens]
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


class StepRecorder(EngineObserver):
    """Records the engine's own times of each step, in milliseconds, and its draft tokens."""

    def __init__(self) -> None:
        self.times: list[dict[str, float]] = []
        self.num_draft_tokens = self.num_accepted_tokens = 0

    def step_finished(self, output: SchedulerOutput, updated: Iterable[Sequence], times: StepTimes) -> None:
        self.times.append(
            {"schedule": 1e3 * times.schedule, "forward": 1e3 * times.forward, "sample": 1e3 * times.sample}
        )
        self.num_draft_tokens += output.num_draft_tokens
        self.num_accepted_tokens += sum(output.num_accepted.values())

    def medians(self) -> dict[str, float]:
        """Return the median of each phase."""
        return {phase: statistics.median(step[phase] for step in self.times) for phase in self.times[0]}


@contextmanager
def decoding(
    llm: LLM, batch: int, context: int, *, steps: int, temperature: float = 0.0, seed: int = 0
) -> Iterator[Engine]:
    """Prefill ``batch`` random prompts of ``context`` tokens; inside, each step decodes all of them.

    Args:
        steps: that will be run inside, at most.
    """
    engine = llm.engine
    rng = random.Random(seed)
    num_prefills = -(-batch * context // engine.config.tokens_per_step)
    limit = steps + num_prefills + batch + 1  # the first prompts decode while the last ones are computed
    params = SamplingParams(temperature=temperature, max_tokens=limit, ignore_eos=True)
    names = [f"decode-{index}" for index in range(batch)]
    for name in names:
        engine.queue_request(EngineRequest(name, random_ids(rng, context, engine.info.vocab_size), params))
    waiting = set(names)
    while waiting:
        waiting -= {output.request_id for output in engine.step()}
    yield engine
    for name in names:
        assert engine.abort(name), "a sequence has ended early"


def timed_steps(part: PartRun, engine: Engine, count: int, *, warm_up: int = 3) -> tuple[float, StepRecorder]:
    """Run steps; return the median time of one, in seconds, and what the engine itself measured."""
    for _ in range(warm_up):
        engine.step()
    recorder = StepRecorder()
    engine.observers.members.append(recorder)
    times = []
    synchronize(part.device)
    started = perf_counter()
    for _ in range(count):
        engine.step()
        ended = perf_counter()  # a step ends when its tokens are on the host
        times.append(ended - started)
        started = ended
    engine.observers.members.remove(recorder)
    return statistics.median(times), recorder
