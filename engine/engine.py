"""Engine: the lifecycle of requests, and the step that schedules, computes and samples one batch.

It ties the scheduler to the model runner. It is synchronous and single-threaded, except that any thread may check
requests and compile grammars. AsyncEngine drives one from a thread of its own, LLM from the caller's thread.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from collections.abc import Sequence as GenericSequence
from time import monotonic, perf_counter
from typing import NamedTuple

from engine.config import EngineConfig
from engine.errors import OverloadedError, RequestError
from engine.kv.block_pool import Block
from engine.kv.events import KVEventBatch
from engine.observability.engine_metrics import EngineMetrics
from engine.observability.kv_events import KVEventReporter
from engine.observability.load_meter import LoadMeter
from engine.observability.metrics import MetricSink, NullSink
from engine.observability.observer import EngineObservers
from engine.observability.sharing_log import SharingLog
from engine.outputs import FinishReason, StepOutputs
from engine.request import EngineRequest
from engine.scheduling.engine_parts import new_block_manager, new_scheduler, new_tiers, new_validator, overlaps_steps
from engine.scheduling.prefill_backlog import PrefillBacklog
from engine.scheduling.queue_limits import QueueLimits
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput, StepTimes
from engine.scheduling.step_outputs import step_outputs
from engine.sequence import Sequence, SequenceGroup
from engine.structured_outputs.compiler import GrammarCompiler
from engine.structured_outputs.grammar import Grammar
from engine.structured_outputs.service import GrammarService
from engine.worker.ranks.rank_hosts import RankHosts
from engine.worker.runner import Runner, StepInFlight

__all__ = ["Engine"]

logger = logging.getLogger(__name__)


class Engine:
    """One model, its KV pool, its queue and its running batch.

    Args:
        config: the engine's options.
        runner: computes the batches.
        sink: stores the values of metrics.
        on_kv_events: receives the changes of the prefix cache, after each step that has any.

    Attributes:
        meter: how busy the engine is and how fast it computes.
        tiers: where KV comes from and goes to beyond memory; None without a host pool.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        sink: MetricSink | None = None,
        on_kv_events: Callable[[KVEventBatch], None] | None = None,
    ) -> None:
        self.config = config
        self.runner = runner
        self.info = info = runner.info
        self.block_manager = new_block_manager(config, info, record_events=on_kv_events is not None)
        self.scheduler = new_scheduler(config, info, self.block_manager, runner.draft_model)
        self.validator = new_validator(config, info, self.scheduler)
        self.backlog = PrefillBacklog(self.block_manager)
        self._queue_limits = QueueLimits(config.max_queued_requests, config.max_queued_prefill_tokens)
        self.meter = LoadMeter(self.scheduler, self.block_manager, self.backlog)
        metrics = EngineMetrics(sink or NullSink(), self.block_manager, self.scheduler)
        metrics.report_start(
            model=config.served_model_name or info.model,
            block_size=str(info.block_size),
            num_blocks=str(info.num_blocks),
            attention_backend=info.attention_backend,
            dtype=info.dtype,
            kv_cache_dtype=info.kv_cache_dtype,
            task="generate",
        )
        self.observers = EngineObservers([self.meter, metrics, SharingLog()])
        if on_kv_events is not None:
            self.observers.members.append(KVEventReporter(self.block_manager, on_kv_events))
        self.tiers = new_tiers(
            config,
            runner,
            self.block_manager,
            self.scheduler,
            lambda: self.meter.speeds.prefill_tokens_per_s,
            sink,
            self.observers.state_changed,
        )
        if self.tiers is not None:
            self.observers.members.append(self.tiers)
            self.meter.source_rates = self.tiers.source_rates
            self.observers.state_changed()  # what an earlier run has left on the disk
        compiler = GrammarCompiler(info.model, info.vocab_size, info.eos_token_ids)
        self.grammars = GrammarService(compiler, on_rejected=self.observers.request_rejected)
        self._groups: dict[str, SequenceGroup] = {}
        self._num_arrived = 0
        self._random = random.Random(config.seed)
        self._overlaps_steps = overlaps_steps(config, info)
        self._in_flight: _Launched | None = None

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        sink: MetricSink | None = None,
        on_kv_events: Callable[[KVEventBatch], None] | None = None,
        hosts: RankHosts | None = None,
    ) -> Engine:
        """Load the model and build the engine around it.

        Args:
            config: its options.
            sink: of its metrics.
            on_kv_events: takes the changes of the prefix cache after each step.
            hosts: where tensor-parallel ranks run; None: all on this host.

        Raises:
            ConfigError, ModelLoadError: as the ModelRunner does.
        """
        options = ", ".join(f"{name}={value!r}" for name, value in vars(config).items())
        logger.info("Initializing an engine with config: %s", options)
        started = perf_counter()
        from engine.worker.device import resolve_device  # imports torch
        from engine.worker.model_runner import ModelRunner

        config = config.on_device(resolve_device(config, rank=None).type)
        engine = cls(config, ModelRunner(config, hosts), sink, on_kv_events)
        logger.info("init engine took %.2f seconds", perf_counter() - started)
        return engine

    @property
    def blocks(self) -> GenericSequence[Block]:
        """The blocks of the KV pool, in order."""
        return self.block_manager.pool.blocks

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or a step is in flight or has pages to copy."""
        return self.can_step or (self.tiers is not None and self.tiers.num_waiting > 0)

    @property
    def can_step(self) -> bool:
        """Whether a step would do anything now; not while all requests wait for pages from a tier."""
        if self.scheduler.has_unfinished or self._in_flight is not None:
            return True
        return self.tiers is not None and self.tiers.needs_step

    def forward_calls(self, post: Callable[[Callable[[], None]], None]) -> None:
        """Let background threads bring their results through ``post``; without it, steps look for them."""
        if self.tiers is not None:
            self.tiers.inbox.forward_to(post)

    # --- requests -----------------------------------------------------------------------------------------------

    def check_request(self, request: EngineRequest) -> None:
        """Reject a request that can never run. The method reads only constants, so any thread may call it.

        Raises:
            RequestError, PromptTooLongError: as ``RequestValidator.check``.
        """
        try:
            self.validator.check(request)
        except RequestError as error:
            self.observers.request_rejected(error)
            raise

    def add_request(self, request: EngineRequest) -> SequenceGroup:
        """Check a request, compile its grammar and queue it.

        Raises:
            RequestError: as ``check_request``, or if the id is in use.
        """
        self.check_request(request)
        if request.request_id in self._groups:
            error = RequestError("is in use", param="request_id", value=request.request_id, remedy="choose another")
            self.observers.request_rejected(error)
            raise error
        grammar = self.grammars.compile(request.params.structured_outputs, request.output_token_ids)
        return self.queue_request(request, grammar=grammar)

    def queue_request(
        self,
        request: EngineRequest,
        *,
        grammar: Grammar | None = None,
        on_rejected: Callable[[str, OverloadedError], None] | None = None,
        arrived: float | None = None,
    ) -> SequenceGroup:
        """Queue a request that ``check_request`` has accepted, under an id that is not in use.

        Args:
            request: the request.
            grammar: of its structured outputs, in the state after its output tokens.
            on_rejected: receives the id of each waiting request that is rejected to make room for this one, and the
                error for its caller. If it is None, or the request is resumed, the limits of the queue do not apply.
            arrived: when the request came, by the monotonic clock; now, if it is None.

        Raises:
            OverloadedError: if the queue is full and holds no request of lower priority.
        """
        assert request.request_id not in self._groups
        if on_rejected is None or request.output_token_ids:
            group = self._new_group(request, grammar)
        else:
            group = self._new_group_within_limits(request, grammar, on_rejected)
        self._num_arrived += 1
        self._groups[request.request_id] = group
        self.observers.request_added(group, monotonic() if arrived is None else arrived)
        if self.tiers is None or not self.tiers.fetching.defer(group):
            self.scheduler.add(group)
        return group

    def _new_group_within_limits(
        self, request: EngineRequest, grammar: Grammar | None, on_rejected: Callable[[str, OverloadedError], None]
    ) -> SequenceGroup:
        """Create the group if the queue limits allow it; this may reject waiting requests of lower priority."""
        limits, queues = self._queue_limits, self.scheduler.queues
        try:
            limits.reject_early(queues.waiting, queues.num_free_slots, request.priority)
            group = self._new_group(request, grammar)
            rejected = limits.choose_rejected(group, queues.waiting, queues.num_free_slots, self.backlog)
        except OverloadedError as error:
            self.observers.request_rejected(error)
            raise
        for victim in rejected:
            rejection = limits.rejection(victim, group)
            self.scheduler.abort(victim)
            self._remove(victim, rejection)
            on_rejected(victim.request_id, rejection)
        return group

    def _new_group(self, request: EngineRequest, grammar: Grammar | None) -> SequenceGroup:
        params, length = request.params, len(request.prompt_token_ids)
        max_total_tokens = self.validator.max_total_tokens(length, params.num_sequences)
        if params.max_tokens is not None:
            max_total_tokens = min(max_total_tokens, length + params.max_tokens)
        eos_ids = () if params.ignore_eos else self.info.eos_token_ids
        group = SequenceGroup(
            request,
            arrival=self._num_arrived,
            root=request.cache_root(self.info.model),
            stop_token_ids=frozenset((*eos_ids, *(params.stop_token_ids or ()))),
            max_total_tokens=max_total_tokens,
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
        )
        group.sequences[0].grammar = grammar
        return group

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request and free its blocks; False if it is unknown or has ended already."""
        group = self._groups.get(request_id)
        if group is None:
            return False
        if self.tiers is not None:
            self.tiers.fetching.cancel(group)
        self.scheduler.abort(group, reason)
        self._remove(group)
        self.observers.state_changed()
        return True

    def end_sequence(self, request_id: str, index: int, reason: FinishReason = FinishReason.STOP) -> bool:
        """End one answer of a request, when a stop string was found in its text for example.

        Answers that are output only at the end (beams, ``best_of``) cannot be ended, nor can answers whose prompt is
        still being computed: no caller has seen their text.

        Returns:
            Whether the answer was ended; the request leaves the engine with its last answer.
        """
        group = self._groups.get(request_id)
        answers = [answer for answer in group.unfinished if answer.index == index] if group is not None else []
        if group is None or not answers or group.outputs_at_end or not group.is_forked:
            return False
        if self.tiers is not None:
            self.tiers.fetching.cancel(group)
        self.scheduler.end_sequence(answers[0], reason)
        self.observers.sequence_ended(answers[0])
        if group.is_finished:
            self._remove(group)
        self.observers.state_changed()
        return True

    def _remove(self, group: SequenceGroup, rejection: OverloadedError | None = None) -> None:
        """Remove a request that has ended. Every request leaves the engine here."""
        del self._groups[group.request_id]
        if self.scheduler.drafter is not None:
            self.scheduler.drafter.learn(group)
        self.observers.request_left(group, rejection)

    # --- the step -----------------------------------------------------------------------------------------------

    def step(self) -> StepOutputs:
        """Schedule, compute and sample one batch; return the sampled tokens of each answer.

        With ``async_scheduling`` the batch is only launched, and the tokens are those of the batch that the last call
        launched. After an exception all requests must be aborted.
        """
        if self.tiers is not None:
            self.tiers.run_calls(wait=not self.can_step)
        try:
            return self._step()
        except BaseException:  # an interrupted offline engine may continue
            self._reset_prefix_cache(step_failed=True)  # blocks are published before they are computed
            raise

    def _step(self) -> StepOutputs:
        times = StepTimes()
        self.observers.step_started()
        started = perf_counter()
        output = self.scheduler.schedule()
        times.draft = output.draft_model_seconds
        times.schedule = perf_counter() - started - times.draft
        self.observers.step_scheduled(output)
        if self._overlaps_steps:
            return self._launch(output, times)
        if output.is_empty:
            return StepOutputs()
        sampled = self.runner.run(output, times)
        return self._finish_step(output, self.scheduler.update(output, sampled), times)

    def _launch(self, output: SchedulerOutput, times: StepTimes) -> StepOutputs:
        """Launch a batch unless it is empty, then wait for the one in flight and return what that has sampled.

            host    | schedule n+1, launch n+1 | wait for n, update with n |schedule n+2, launch n+2 | wait for n+1 ...
            device  ... step n                            | step n+1                                      | step n+2

        The scheduler counts n+1 as launched when n is collected, so it never has more than one step in flight.
        """
        previous, self._in_flight = self._in_flight, None  # none is in flight after an exception
        launched = None if output.is_empty else _Launched(output, times, self.runner.start(output))
        outputs = StepOutputs() if previous is None else self._collect(previous, output)
        if launched is not None:
            self.scheduler.launch(output)
            if output.lacks_blocks:
                outputs.extend(self._collect(launched))
            else:
                self._in_flight = launched
        return outputs

    def _collect(self, launched: _Launched, following: SchedulerOutput | None = None) -> StepOutputs:
        """Wait for a step in flight; return what it has sampled."""
        output, times, in_flight = launched
        sampled: SampledTokens = in_flight.finish(times)
        return self._finish_step(output, self.scheduler.collect(output, sampled, following), times)

    def _finish_step(self, output: SchedulerOutput, updated: list[Sequence], times: StepTimes) -> StepOutputs:
        """Remove the requests that have ended in a step; return its outputs."""
        self.scheduler.record_step(output, times)
        self.observers.step_finished(output, updated, times)
        for sequence in updated:
            if sequence.is_finished and sequence.group.is_finished and sequence.request_id in self._groups:
                self._remove(sequence.group)
        return step_outputs(updated, output.num_accepted, output.drafts_by("prediction"))

    def reset_prefix_cache(self) -> None:
        """Drop every cached prefix, after the weights have changed for example. Running requests continue."""
        self._reset_prefix_cache(step_failed=False)
        self.observers.state_changed()

    def _reset_prefix_cache(self, *, step_failed: bool) -> None:
        self.block_manager.prefix_cache.reset()
        if self.tiers is not None:
            self.tiers.reset(step_failed=step_failed)

    def close(self) -> None:
        """End the processes of the runner and of the grammar compiler. The engine cannot be used afterwards."""
        self.grammars.close()
        if self.tiers is not None:
            self.tiers.close()
        self.runner.close()


class _Launched(NamedTuple):
    """A step in flight."""

    output: SchedulerOutput
    times: StepTimes
    in_flight: StepInFlight
