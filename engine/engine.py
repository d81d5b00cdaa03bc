"""Engine: add, abort, step.

It ties the scheduler to the model runner and checks requests at the door. It is synchronous and single-threaded;
AsyncEngine drives one from a thread of its own, LLM from the caller's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from engine.block_manager import BlockManager
from engine.config import EngineConfig
from engine.errors import PromptTooLongError, RequestError
from engine.metrics import ENGINE_INFO, EngineMetrics, MetricSink, NullSink, StepTimes
from engine.prefix_hash import root_hash
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler, SchedulerOutput
from engine.sequence import FinishReason, Sequence

__all__ = ["Engine", "EngineInfo", "EngineStats", "Runner", "StepOutput"]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a front end must know of an engine. It pickles."""

    model: str  # as configured; the root of the block hashes
    block_size: int
    num_blocks: int
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    attention_backend: str
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, Any]  # what generation_config.json sets of temperature, top_p, top_k, min_p


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How busy an engine is."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One request's new token, and how it ended if it did."""

    request_id: str
    token_id: int
    finish_reason: FinishReason | None
    stop_reason: int | None
    num_cached_tokens: int


class Runner(Protocol):
    """What computes a batch: the ModelRunner, or a fake in tests of the scheduling around it."""

    def run(self, output: SchedulerOutput, times: StepTimes) -> list[int]:
        """Return a token for each of ``output.sampling``."""

    def close(self) -> None:
        """End what the runner has started; nothing can run afterwards."""


class Engine:
    """One model, its KV pool and its queue.

    Args:
        config: the engine's options.
        runner: computes the batches.
        info: what the runner found out about the model and the machine.
        sink: where metrics go.
    """

    def __init__(self, config: EngineConfig, runner: Runner, info: EngineInfo, sink: MetricSink | None = None) -> None:
        self.config = config
        self.info = info
        self.runner = runner
        self.block_manager = BlockManager(
            info.num_blocks, info.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        sink = sink or NullSink()
        self.metrics = EngineMetrics(sink, self.block_manager, self.scheduler)
        sink.set(
            ENGINE_INFO, 1, model=info.model, block_size=str(info.block_size), num_blocks=str(info.num_blocks),
            attention_backend=info.attention_backend, dtype=info.dtype,
        )  # fmt: skip
        self.metrics.report_state()
        self._sequences: dict[str, Sequence] = {}
        self._num_arrived = 0
        self._random = random.Random(config.seed)

    @classmethod
    def from_config(cls, config: EngineConfig, sink: MetricSink | None = None) -> Engine:
        """Load the model and build the engine around it.

        Raises:
            ConfigError, ModelLoadError: as the ModelRunner does.
        """
        from engine.model_runner import ModelRunner  # imports torch

        runner = ModelRunner(config)
        info = EngineInfo(
            model=config.model,
            block_size=runner.block_size,
            num_blocks=runner.num_blocks,
            max_model_len=runner.max_model_len,
            vocab_size=runner.model_config.vocab_size,
            dtype=str(runner.dtype).removeprefix("torch."),
            device=str(runner.device),
            attention_backend=runner.backend.name,
            eos_token_ids=runner.generation_defaults.eos_token_ids,
            default_sampling=runner.generation_defaults.sampling,
        )
        return cls(config, runner, info, sink)

    # --- requests -----------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_unfinished

    @property
    def capacity(self) -> int:
        """Tokens, prompt and output together, that one request can have at most."""
        return min(self.info.max_model_len, self.info.num_blocks * self.info.block_size)

    def check_request(
        self, prompt_token_ids: list[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> None:
        """Refuse, and count, a request that could never run. Reads only what is fixed, so any thread may call it.

        Raises:
            RequestError: if the prompt is empty, an id is outside the vocabulary, or an argument is of a wrong type.
            PromptTooLongError: if the prompt leaves no room for a token in the context or the KV pool.
        """
        try:
            self._check_ids("prompt", prompt_token_ids)
            self._check_ids("stop_token_ids", params.stop_token_ids or ())
            self._check_length(len(prompt_token_ids))
            if isinstance(priority, bool) or not isinstance(priority, int):
                raise RequestError(f"priority={priority!r} must be an integer", "priority")
            if not isinstance(cache_salt, str) or not cache_salt.isprintable():
                raise RequestError(f"cache_salt={cache_salt!r} must be printable text", "cache_salt")
        except RequestError as error:
            self.metrics.request_rejected(error.param or "invalid")
            raise

    def _check_ids(self, name: str, token_ids: Sequence_[int]) -> None:
        vocab_size = self.info.vocab_size
        # The quick test first: prompts of 100,000 tokens are checked on the event loop.
        if set(map(type, token_ids)) <= {int} and (not token_ids or 0 <= min(token_ids) <= max(token_ids) < vocab_size):
            return
        wrong = next(i for i in token_ids if type(i) is not int or not 0 <= i < vocab_size)
        raise RequestError(f"{name} has the id {wrong!r}; the vocabulary is 0..{vocab_size - 1}", name)

    def _check_length(self, length: int) -> None:
        if length == 0:
            raise RequestError("the prompt is empty; give at least one token", "prompt")
        if length >= self.capacity:
            limit = "context" if self.capacity == self.info.max_model_len else "KV cache"
            raise PromptTooLongError(
                f"the prompt has {length} tokens, but the {limit} of '{self.info.model}' holds {self.capacity} with "
                f"the answer; shorten it by at least {length - self.capacity + 1}",
                "prompt",
            )

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Sequence:
        """Check a request and queue it.

        Raises:
            RequestError: as ``check_request``, or if the id is in use.
        """
        self.check_request(prompt_token_ids, params, priority=priority, cache_salt=cache_salt)
        if request_id in self._sequences:
            self.metrics.request_rejected("request_id")
            raise RequestError(f"request_id '{request_id}' is in use; choose another", "request_id")
        return self.queue_request(request_id, prompt_token_ids, params, priority=priority, cache_salt=cache_salt)

    def queue_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Sequence:
        """Queue a request that ``check_request`` has let in, under an id that is not in use."""
        assert request_id not in self._sequences
        limit = self.capacity if params.max_tokens is None else len(prompt_token_ids) + params.max_tokens
        eos_ids = () if params.ignore_eos else self.info.eos_token_ids
        sequence = Sequence(
            request_id,
            prompt_token_ids,
            params,
            arrival=self._num_arrived,
            root=root_hash(self.info.model, "", cache_salt),
            cache_salt=cache_salt,
            stop_token_ids=frozenset((*eos_ids, *(params.stop_token_ids or ()))),
            max_total_tokens=min(limit, self.capacity),
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
            priority=priority,
        )
        self._num_arrived += 1
        self._sequences[request_id] = sequence
        self.metrics.request_added(sequence)
        self.scheduler.add(sequence)
        return sequence

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request and free its blocks; False if it is unknown or has ended already.

        ``reason`` is ``stop`` when whoever makes the text has found a stop string in it.
        """
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self.scheduler.abort(sequence, reason)
        self.metrics.request_finished(sequence)
        self.metrics.report_state()
        return True

    def close(self) -> None:
        """Let go of what computes: tensor-parallel ranks end. No step can follow."""
        self.runner.close()

    def stats(self) -> EngineStats:
        """Return how busy the engine is."""
        counts = self.block_manager.counts()
        return EngineStats(
            len(self.scheduler.running), len(self.scheduler.waiting), counts.free, counts.cached, counts.used
        )

    # --- the loop -----------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Schedule, compute and record one batch; returns the new tokens, one per sequence that got one."""
        times = StepTimes()
        started = perf_counter()
        output = self.scheduler.schedule()
        times.schedule = perf_counter() - started
        if not output.scheduled:
            return []
        self.metrics.step_scheduled(output)
        token_ids = self.runner.run(output, times)
        sampled = self.scheduler.update(output, token_ids)
        self.metrics.step_finished(output, sampled, times)
        for sequence in sampled:
            if sequence.is_finished:
                del self._sequences[sequence.request_id]
        return [
            StepOutput(s.request_id, s.token_ids[-1], s.finish_reason, s.stop_reason, s.num_cached_tokens)
            for s in sampled
        ]
