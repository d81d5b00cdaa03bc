"""Engine: add, abort, step.

It ties the scheduler to the model runner and checks requests at the door. It is synchronous and single-threaded, but
for the checks and the compilation of grammars, which any thread may call; AsyncEngine drives one from a thread of its
own, LLM from the caller's.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from engine.config import EngineConfig
from engine.errors import OverloadedError, RequestError
from engine.kv.block_manager import BlockManager
from engine.kv.events import KVEventBatch
from engine.observability.load import EngineLoad, LoadMeter
from engine.observability.metrics import ENGINE_INFO, ENGINE_START_TIME, OVERLOADED, EngineMetrics, MetricSink, NullSink
from engine.outputs import EngineOutput, FinishReason
from engine.prefix_hash import root_hash
from engine.request import EngineRequest
from engine.request_validator import RequestValidator
from engine.sampling_params import SamplingParams
from engine.scheduling.drafter import Drafter
from engine.scheduling.ngram_proposer import NgramProposer
from engine.scheduling.prefill_backlog import PrefillBacklog
from engine.scheduling.prefill_pace import PrefillPace
from engine.scheduling.queue_limits import QueueLimits
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import SampledTokens, SchedulerOutput, StepTimes
from engine.scheduling.step_outputs import step_outputs
from engine.sequence import SequenceGroup

if TYPE_CHECKING:
    from engine.structured_outputs.compiler import GrammarCompiler
    from engine.structured_outputs.grammar import Grammar

__all__ = ["Engine", "EngineInfo", "EngineStats", "Runner"]

logger = logging.getLogger(__name__)


_MAX_GRAMMAR_THREADS = 32  # most only wait, for the child that tries grammars out or for one of the others
_MOST_TOKENS_AT_ONCE = 256  # that a grammar takes in a few milliseconds


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a front end must know of an engine. It pickles."""

    model: str  # as configured; the root of the block hashes
    block_size: int
    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    attention_backend: str
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, Any]  # what generation_config.json sets of temperature, top_p, top_k, min_p
    free_tokens: int | None = None  # that a step computes in about the time of one, where that was measured


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How busy an engine is."""

    num_running: int
    num_waiting: int
    num_swapped: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int


class Runner(Protocol):
    """What computes a batch: the ModelRunner, or a fake in tests of the scheduling around it."""

    def run(self, output: SchedulerOutput, times: StepTimes) -> SampledTokens:
        """Return what each of ``output.sampling`` got."""

    def check_health(self) -> None:
        """Raise EngineDeadError if no further batch can be computed. Any thread may ask."""

    def close(self) -> None:
        """Give back what the runner holds besides memory: processes, for one."""


class Engine:
    """One model, its KV pool and its queue.

    Args:
        config: the engine's options.
        runner: computes the batches.
        info: what the runner found out about the model and the machine.
        sink: where metrics go.
        on_kv_events: told after each step what it changed in the prefix cache, if anything.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        info: EngineInfo,
        sink: MetricSink | None = None,
        on_kv_events: Callable[[KVEventBatch], None] | None = None,
    ) -> None:
        self.config = config
        self.info = info
        self.runner = runner
        self.block_manager = BlockManager(
            info.num_blocks,
            info.block_size,
            num_host_blocks=info.num_host_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            record_events=on_kv_events is not None,
        )
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            long_prefill_threshold=config.long_prefill_threshold,
            pace=_pace(config, info),
            drafter=_drafter(config, self.block_manager),
        )
        self.validator = RequestValidator(
            model=info.model,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_num_seqs=self.scheduler.max_num_running,
            shares_prefixes=config.enable_prefix_caching,
        )
        sink = sink or NullSink()
        self.metrics = EngineMetrics(sink, self.block_manager, self.scheduler)
        sink.set(
            ENGINE_INFO,
            1,
            model=config.served_model_name or info.model,
            block_size=str(info.block_size),
            num_blocks=str(info.num_blocks),
            attention_backend=info.attention_backend,
            dtype=info.dtype,
        )
        sink.set(ENGINE_START_TIME, time.time())
        self.metrics.report_state()
        self._backlog = PrefillBacklog(self.block_manager)
        self._meter = LoadMeter(self._backlog)
        self._queue_limits = QueueLimits(config.max_queued_requests, config.max_queued_prefill_tokens)
        self._num_left = 0
        self._groups: dict[str, SequenceGroup] = {}
        self._num_arrived = 0
        self._on_kv_events = on_kv_events
        self._generation = time.time_ns()
        self._num_event_batches = 0
        self._random = random.Random(config.seed)
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = threading.Lock()
        self._grammar_threads = ThreadPoolExecutor(_MAX_GRAMMAR_THREADS, thread_name_prefix="grammar-compiler")

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        sink: MetricSink | None = None,
        on_kv_events: Callable[[KVEventBatch], None] | None = None,
    ) -> Engine:
        """Load the model and build the engine around it.

        Raises:
            ConfigError, ModelLoadError: as the ModelRunner does.
        """
        options = ", ".join(f"{name}={value!r}" for name, value in vars(config).items())
        logger.info("Initializing an engine with config: %s", options)
        started = perf_counter()
        from engine.worker.model_runner import ModelRunner  # imports torch

        runner = ModelRunner(config)
        info = EngineInfo(
            model=config.model,
            block_size=runner.block_size,
            num_blocks=runner.num_blocks,
            num_host_blocks=runner.num_host_blocks,
            max_model_len=runner.max_model_len,
            vocab_size=runner.model_config.vocab_size,
            dtype=str(runner.dtype).removeprefix("torch."),
            device=str(runner.device),
            attention_backend=runner.backend.name,
            eos_token_ids=runner.generation_defaults.eos_token_ids,
            default_sampling=runner.generation_defaults.sampling,
            free_tokens=runner.free_tokens,
        )
        engine = cls(config, runner, info, sink, on_kv_events)
        logger.info("init engine took %.2f seconds", perf_counter() - started)
        return engine

    # --- requests -----------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_unfinished

    @property
    def capacity(self) -> int:
        """Tokens, prompt and output together, that one request can have at most."""
        return self.validator.capacity

    def check_request(self, request: EngineRequest) -> None:
        """Refuse, and count, a request that could never run. Reads only what is fixed, so any thread may call it.

        Raises:
            RequestError, PromptTooLongError: as ``RequestValidator.check``.
        """
        try:
            self.validator.check(request)
        except RequestError as error:
            self.metrics.request_rejected(error.param or "invalid")
            raise

    def add_request(self, request: EngineRequest) -> SequenceGroup:
        """Check a request and queue it.

        Raises:
            RequestError: as ``check_request``, or if the id is in use.
        """
        self.check_request(request)
        if (request_id := request.request_id) in self._groups:
            self.metrics.request_rejected("request_id")
            raise RequestError("is in use", param="request_id", value=request_id, remedy="choose another")
        return self.queue_request(request, grammar=self.compile_grammar(request.params))

    def compile_grammar(self, params: SamplingParams, output_token_ids: Sequence_[int] = ()) -> Grammar | None:
        """Return the grammar of a request's structured outputs, if it has any, in its state behind these tokens.

        Takes time, but any thread may call it.

        Raises:
            RequestError: if it cannot be compiled, or not in time, or does not allow the tokens.
        """
        if params.structured_outputs is None:
            return None
        try:
            with self._compiler_lock:
                if self._compiler is None:
                    from engine.structured_outputs.compiler import GrammarCompiler  # only where grammars are used

                    self._compiler = GrammarCompiler(self.info.model, self.info.vocab_size, self.info.eos_token_ids)
            return _advanced(self._compiler.compile(params.structured_outputs), output_token_ids)
        except RequestError as error:
            self.metrics.request_rejected(error.param or "invalid")
            raise

    def cached_grammar(self, params: SamplingParams, output_token_ids: Sequence_[int] = ()) -> Grammar | None:
        """Return what ``compile_grammar`` would if it can be had without waiting; None if it cannot.

        Any thread may call it, that of an event loop too.

        Raises:
            RequestError: as ``compile_grammar`` does, where that is known already.
        """
        compiler = self._compiler
        if params.structured_outputs is None or compiler is None or len(output_token_ids) > _MOST_TOKENS_AT_ONCE:
            return None
        try:
            grammar = compiler.cached(params.structured_outputs)
            return None if grammar is None else _advanced(grammar, output_token_ids)
        except RequestError as error:
            self.metrics.request_rejected(error.param or "invalid")
            raise

    async def compile_grammar_soon(
        self, params: SamplingParams, output_token_ids: Sequence_[int] = ()
    ) -> Grammar | None:
        """Return what ``compile_grammar`` does, which runs in threads that do nothing else.

        Raises:
            RequestError: as ``compile_grammar`` does.
        """
        if params.structured_outputs is None:
            return None
        grammar = self.cached_grammar(params, output_token_ids)
        if grammar is not None:
            return grammar
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._grammar_threads, self.compile_grammar, params, output_token_ids)

    def queue_request(
        self,
        request: EngineRequest,
        *,
        grammar: Grammar | None = None,
        on_shed: Callable[[str, OverloadedError], None] | None = None,
    ) -> SequenceGroup:
        """Queue a request that ``check_request`` has let in, under an id that is not in use.

        Args:
            request: the request.
            grammar: what ``compile_grammar`` made of its structured outputs and its output tokens.
            on_shed: told who gave way to this request, and what to tell its reader. Without it the queue has no bounds.

        Raises:
            OverloadedError: if the queue is full and nobody gives way.
        """
        assert request.request_id not in self._groups
        is_bounded = on_shed is not None and not request.output_token_ids
        if is_bounded:
            self._refuse_early(request.priority)
        length, params = len(request.prompt_token_ids), request.params
        longest = self.validator.max_total_tokens(length, params.num_sequences)
        eos_ids = () if params.ignore_eos else self.info.eos_token_ids
        group = SequenceGroup(
            request,
            arrival=self._num_arrived,
            root=root_hash(self.info.model, "", request.cache_salt),
            stop_token_ids=frozenset((*eos_ids, *(params.stop_token_ids or ()))),
            max_total_tokens=longest if params.max_tokens is None else min(longest, length + params.max_tokens),
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
        )
        group.sequences[0].grammar = grammar
        if is_bounded and on_shed is not None:
            self._make_room(group, on_shed)
        self._num_arrived += 1
        self._groups[request.request_id] = group
        self.metrics.request_added(group)
        self.scheduler.add(group)
        self._backlog.add(group)
        return group

    def _refuse_early(self, priority: int) -> None:
        try:
            self._queue_limits.reject_early(self.scheduler.waiting, self.scheduler.num_free_slots, priority)
        except OverloadedError:
            self.metrics.request_rejected(OVERLOADED)
            raise

    def _make_room(self, group: SequenceGroup, on_shed: Callable[[str, OverloadedError], None]) -> None:
        """Shed whom the bounds of the queue demand, or refuse the group."""
        try:
            waiting, num_free_slots = self.scheduler.waiting, self.scheduler.num_free_slots
            shed = self._queue_limits.make_room(group, waiting, num_free_slots, self._backlog)
        except OverloadedError:
            self.metrics.request_rejected(OVERLOADED)
            raise
        for one in shed:
            self.scheduler.abort(one)
            del self._groups[one.request_id]
            self._num_left += 1
            self.metrics.request_shed(one)
            on_shed(one.request_id, self._queue_limits.rejection(one, group))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request and free its blocks; False if it is unknown or has ended already."""
        group = self._groups.get(request_id)
        if group is None:
            return False
        self.scheduler.abort(group, reason)
        self._forget(group)
        return True

    def end_sequence(self, request_id: str, index: int, reason: FinishReason = FinishReason.STOP) -> bool:
        """End one answer of a request, as whoever makes the text does when it finds a stop string.

        Answers that are held back until the end (beams, ``best_of``), or of which there are not yet several, cannot be
        ended: nobody has seen their text.

        Returns:
            Whether the answer was ended; the request is forgotten with its last one.
        """
        group = self._groups.get(request_id)
        found = [one for one in group.unfinished if one.index == index] if group is not None else []
        if group is None or not found or group.outputs_at_end or not group.is_forked:
            return False
        self.scheduler.end_sequence(found[0], reason)
        self._backlog.end(found[0])
        self._send_kv_events()
        if group.is_finished:
            self._forget(group)
        return True

    def is_unfinished(self, request_id: str) -> bool:
        """Whether a request is known and has not ended."""
        return request_id in self._groups

    def _forget(self, group: SequenceGroup) -> None:
        """Take leave of a request that has ended."""
        del self._groups[group.request_id]
        self._backlog.remove(group)
        self._num_left += 1
        _log_sharing(group)
        self.metrics.request_finished(group)
        self.metrics.report_state()
        self._send_kv_events()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, after the weights have changed for example. Running requests go on."""
        self.block_manager.prefix_cache.reset()
        self._send_kv_events()
        self.metrics.report_state()

    def stats(self) -> EngineStats:
        """Return how busy the engine is."""
        counts, scheduler = self.block_manager.pool.counts(), self.scheduler
        num_swapped = scheduler.num_swapped
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) - num_swapped,
            num_swapped=num_swapped,
            num_free_blocks=counts.free,
            num_cached_blocks=counts.cached,
            num_used_blocks=counts.used,
        )

    def load(self) -> EngineLoad:
        """Return how busy the engine is and how fast, between two steps. It costs no more for a longer queue."""
        return EngineLoad(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            queued_prefill_tokens=self._backlog.num_tokens,
            num_blocks=self.info.num_blocks,
            num_free_blocks=self.block_manager.num_free_blocks,
            prefill_tokens_per_s=self._meter.prefill_tokens_per_s,
            decode_step_s=self._meter.decode_step_s,
            num_steps=self._meter.num_steps,
        )

    @property
    def num_changes(self) -> int:
        """Requests that have arrived so far, and those that have left."""
        return self._num_arrived + self._num_left

    def close(self) -> None:
        """End what the runner and the grammars have started; the engine is of no use afterwards."""
        with self._compiler_lock:
            if self._compiler is not None:
                self._compiler.close()
        self.runner.close()

    # --- the loop -----------------------------------------------------------------------------------------------

    def step(self) -> list[EngineOutput]:
        """Schedule, compute and record one batch; returns what each answer got that got something to tell."""
        times = StepTimes()
        self._meter.step_started()
        started = perf_counter()
        output = self.scheduler.schedule()
        times.schedule = perf_counter() - started
        self._meter.step_scheduled(output)
        if output.is_empty:
            return []
        self.metrics.step_scheduled(output)
        sampled = self.runner.run(output, times)
        got_token = self.scheduler.update(output, sampled)
        self._meter.step_finished(output.num_tokens - output.num_draft_tokens, len(output.sequences))
        self.metrics.step_finished(output, got_token, times)
        self._send_kv_events()
        for sequence in got_token:
            if sequence.is_finished and sequence.group.is_finished and sequence.request_id in self._groups:
                del self._groups[sequence.request_id]
                self._backlog.remove(sequence.group)
                self._num_left += 1
                _log_sharing(sequence.group)
        return step_outputs(got_token, output.num_accepted)

    def _send_kv_events(self) -> None:
        if self._on_kv_events is not None and (events := self.block_manager.prefix_cache.take_events()):
            self._on_kv_events(KVEventBatch(self._generation, self._num_event_batches, events))
            self._num_event_batches += 1


def _drafter(config: EngineConfig, block_manager: BlockManager) -> Drafter | None:
    """Return what guesses tokens, if something does."""
    if (options := config.speculation) is None:
        return None
    proposer = NgramProposer(options.prompt_lookup_min, options.prompt_lookup_max)
    return Drafter(block_manager, proposer, options.num_speculative_tokens)


def _pace(config: EngineConfig, info: EngineInfo) -> PrefillPace | None:
    slowdown = config.max_decode_slowdown
    if slowdown is None or info.free_tokens is None:
        return None
    return PrefillPace(info.free_tokens, slowdown)


def _advanced(grammar: Grammar, token_ids: Sequence_[int]) -> Grammar:
    """Return ``grammar`` in its state behind tokens that were generated before."""
    if not all(map(grammar.accept, token_ids)):
        raise RequestError(
            f"do not fit the tokens that were generated earlier: {grammar.error}", param="structured_outputs"
        )
    return grammar


def _log_sharing(group: SequenceGroup) -> None:
    """Say what sharing saved a request for several answers; when it was the most that was seen at an answer's end."""
    if group.num_blocks_saved:
        saved, held = group.num_blocks_saved, group.num_blocks_held
        logger.info(
            "request %s: sharing saved %d of the %d KV blocks of its answers (%.0f%%)",
            group.request_id,
            saved,
            held,
            100 * saved / held,
        )
