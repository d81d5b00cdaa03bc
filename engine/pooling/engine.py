"""PoolingEngine: the queue of texts, and the step that computes one batch of them.

AsyncEngine drives it as it drives engine.engine.Engine, so that a replica serves both kinds alike. It is synchronous
and single-threaded, except that any thread may check requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Protocol

import numpy as np

from engine.config import EngineConfig, EngineInfo
from engine.errors import OverloadedError, RequestError
from engine.observability.metrics import MetricSink, NullSink
from engine.outputs import EngineOutput, FinishReason, RequestTiming, StepOutputs
from engine.pooling.config import PoolingConfig
from engine.pooling.meter import PoolingMeter
from engine.pooling.metrics import PoolingMetrics
from engine.pooling.model import Text
from engine.pooling.params import PoolingParams
from engine.pooling.queue import TextQueue, WaitingText
from engine.request import EngineRequest, PromptValidator
from engine.structured_outputs.grammar import Grammar

__all__ = ["PoolingEngine", "Runner"]

logger = logging.getLogger(__name__)

NOT_FINITE = "the model's output for this text is not finite"


class Runner(Protocol):
    """Computes batches."""

    info: EngineInfo

    def run(self, texts: list[Text]) -> list[bytes]:
        """Return the result of each text: little-endian float32."""

    def check_health(self) -> None:
        """Raise EngineDeadError if no batch can be computed any more."""


class PoolingEngine:
    """One model and its queue.

    Args:
        config: the engine's options.
        runner: computes the batches.
        sink: stores the values of metrics.

    Attributes:
        meter: how busy the engine is and how fast it computes.
    """

    grammars = None  # of structured outputs, which only generated text has
    blocks = ()  # of a KV cache, which it does not have

    def __init__(self, config: EngineConfig, runner: Runner, sink: MetricSink | None = None) -> None:
        assert runner.info.pooling is not None
        self.config = config
        self.runner = runner
        self.info = info = runner.info
        self.validator = PromptValidator(
            model=info.model,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            num_blocks=0,
            block_size=info.block_size,
            max_logprobs=0,
        )
        self._queue = TextQueue(config.max_queued_requests, config.max_queued_prefill_tokens)
        self.meter = PoolingMeter(self._queue)
        self._metrics = PoolingMetrics(sink or NullSink(), self._queue)
        self._metrics.report_start(config.served_model_name or info.model, info)

    @classmethod
    def from_config(cls, config: EngineConfig, pooling: PoolingConfig, sink: MetricSink | None = None) -> PoolingEngine:
        """Load the model and build the engine around it.

        Raises:
            ConfigError, ModelLoadError: as PoolingRunner does.
        """
        logger.info("Initializing a pooling engine with config: %s, %s", config, pooling)
        from engine.pooling.runner import PoolingRunner  # imports torch
        from engine.worker.device import resolve_device

        config = config.on_device(resolve_device(config, rank=None).type)
        return cls(config, PoolingRunner(config, pooling), sink)

    @property
    def has_unfinished(self) -> bool:
        """Whether any text waits."""
        return len(self._queue) > 0

    @property
    def can_step(self) -> bool:
        """Whether any text waits."""
        return self.has_unfinished

    def forward_calls(self, post: Callable[[Callable[[], None]], None]) -> None:
        """Do nothing: there is no background thread."""

    def check_request(self, request: EngineRequest) -> None:
        """Reject a request that can never be computed. The method reads only constants, so any thread may call it.

        Raises:
            RequestError: if the text is empty, or an id is not in the vocabulary.
            PromptTooLongError: if the text is longer than the model's context.
        """
        try:
            if request.pooling is None:
                problem = f"asks for generated text, and this model serves task {self.info.pooling.task}"  # type: ignore[union-attr]
                raise RequestError(problem, param="model")
            self.validator.check_text(request.prompt_token_ids)
        except RequestError as error:
            self._metrics.rejected(error)
            raise

    def queue_request(
        self,
        request: EngineRequest,
        *,
        grammar: Grammar | None = None,
        on_rejected: Callable[[str, OverloadedError], None] | None = None,
        arrived: float | None = None,
    ) -> None:
        """Queue a request that ``check_request`` has accepted, under an id that is not in use.

        Args:
            request: the request.
            grammar: there is none.
            on_rejected: receives the id of each waiting request that is rejected to make room for this one, and the
                error for its caller.
            arrived: when the request came, by the monotonic clock; now, if it is None.

        Raises:
            OverloadedError: if the queue is full and holds no requests of lower priority.
        """
        assert grammar is None
        try:
            rejected = self._queue.add(request, monotonic() if arrived is None else arrived)
        except OverloadedError as error:
            self._metrics.rejected(error)
            raise
        self.meter.num_changes += 1
        for victim in rejected:
            rejection = OverloadedError("a request of higher priority took the place in the queue; try again shortly")
            self.meter.num_changes += 1
            self._metrics.rejected(rejection)
            if on_rejected is not None:
                on_rejected(victim.request.request_id, rejection)
        self._metrics.state_changed()

    def abort(self, request_id: str) -> bool:
        """Remove a waiting request; False if it is unknown."""
        if (text := self._queue.remove(request_id)) is None:
            return False
        self.meter.num_changes += 1
        self._metrics.ended(text, FinishReason.ABORT.value)
        self._metrics.state_changed()
        return True

    def step(self) -> StepOutputs:
        """Compute one batch, and return the results of its texts."""
        outputs = StepOutputs()
        started = perf_counter()
        batch = self._queue.next_batch(self.config.tokens_per_step, self.config.max_num_seqs)
        if not batch:
            return outputs
        self.meter.num_running = len(batch)
        begun = monotonic()
        scheduled_s = perf_counter() - started
        results = self.runner.run([_text(waiting) for waiting in batch])
        seconds = monotonic() - begun
        self.meter.step_finished(batch, seconds)
        self._metrics.step_finished(batch, scheduled_s, seconds)
        for waiting, result in zip(batch, results, strict=True):
            timing = RequestTiming(max(0.0, begun - waiting.arrived), seconds)
            outputs.others.append(self._output(waiting, result, timing))
        self._metrics.state_changed()
        return outputs

    def _output(self, waiting: WaitingText, result: bytes, timing: RequestTiming) -> EngineOutput:
        is_finite = bool(np.isfinite(np.frombuffer(result, "<f4")).all())
        self._metrics.ended(waiting, FinishReason.STOP.value if is_finite else "error")
        return EngineOutput(
            waiting.request.request_id,
            0,
            [],
            FinishReason.STOP if is_finite else FinishReason.ABORT,
            None if is_finite else NOT_FINITE,
            is_last=True,
            timing=timing,
            pooled=result if is_finite else None,
        )

    def close(self) -> None:
        """There is nothing to end: the model is in this process."""


def _text(waiting: WaitingText) -> Text:
    request = waiting.request
    return Text(request.prompt_token_ids, request.pooling or PoolingParams())
