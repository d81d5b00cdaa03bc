"""An engine that computes nothing: a runner whose tokens are random and whose step takes as long as one wants."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep, thread_time

from benchmarks.front.step_delays import StepDelays
from engine.config import EngineConfig, EngineInfo
from engine.engine import Engine
from engine.kv.events import KVEventBatch
from engine.models.config.files.config_json import read_config_json
from engine.observability.metrics import MetricSink
from engine.outputs import StepOutputs
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput, StepTimes
from engine.worker.ranks.rank_hosts import RankHosts
from engine.worker.runner import ComputedStep

__all__ = ["DELAYS_FILE", "STEPS_FILE", "STEP_MS", "ComputeFreeEngine", "ComputeFreeRunner"]

STEP_MS = "PAGODA_FRONT_STEP_MS"  # milliseconds that a step waits, as for a GPU; 0: none
STEPS_FILE = "PAGODA_FRONT_STEPS_FILE"  # where the engine writes the CPU time of its steps
DELAYS_FILE = "PAGODA_FRONT_DELAYS_FILE"  # where the engine appends how late each of its steps was (step_delay.py)
WRITE_INTERVAL_S = 0.1
NUM_BLOCKS, BLOCK_SIZE = 65_536, 16
VOCABULARY = (300, 2000)  # plain text in the demo model's tokenizer
NUM_DRAWN = 8192


class ComputeFreeRunner:
    """Returns random tokens after a wait, during which other threads run, as during a GPU's step.

    Args:
        config: names the model.
        step_s: seconds to wait in each step.
    """

    def __init__(self, config: EngineConfig, step_s: float = 0.0) -> None:
        model = read_config_json(config.model)
        eos = model["eos_token_id"]
        self.info = EngineInfo(
            model=config.model,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            num_host_blocks=0,
            max_model_len=model["max_position_embeddings"],
            vocab_size=model["vocab_size"],
            dtype="none",
            device="cpu",
            attention_backend="none",
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
            default_sampling={},
        )
        self._step_s = step_s
        self.delays = StepDelays(os.environ.get(DELAYS_FILE))
        self._tokens = random.Random(0).choices(range(*VOCABULARY), k=NUM_DRAWN)
        self._next = 0

    def start(self, output: SchedulerOutput) -> ComputedStep:
        """Do what ``run`` does."""
        return ComputedStep(self.run(output, StepTimes()))

    def run(self, output: SchedulerOutput, times: StepTimes) -> SampledTokens:
        """Return a token for each sequence."""
        count = len(output.sampling)
        if self._next + count > NUM_DRAWN:
            self._next = 0
        tokens = self._tokens[self._next : self._next + count]
        self._next += count
        if self._step_s:
            self.delays.start_wait(self._step_s)
            sleep(self._step_s)
        return SampledTokens(tokens)

    @property
    def host_memory(self) -> None:
        """None: it has no memory."""

    @property
    def draft_model(self) -> None:
        """None: it drafts nothing."""

    def check_health(self) -> None:
        """Always healthy."""

    def close(self) -> None:
        """Nothing to release."""


class ComputeFreeEngine(Engine):
    """An engine without a model. It adds up the CPU seconds of its steps and writes them to a file now and then."""

    step_cpu_s = 0.0
    _written = 0.0
    _delays: StepDelays

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        sink: MetricSink | None = None,
        on_kv_events: Callable[[KVEventBatch], None] | None = None,
        hosts: RankHosts | None = None,
    ) -> ComputeFreeEngine:
        """Build the engine; the environment gives the time of a step."""
        runner = ComputeFreeRunner(config, float(os.environ.get(STEP_MS, "0")) / 1e3)
        replica_engine = cls(config, runner, sink, on_kv_events)
        replica_engine._delays = runner.delays
        return replica_engine

    def step(self) -> StepOutputs:
        """Run one step."""
        started = thread_time()
        outputs = super().step()
        self.step_cpu_s += thread_time() - started
        if not self.has_unfinished:
            self._delays.go_idle()
        if (now := monotonic()) > self._written + WRITE_INTERVAL_S:
            self._written = now
            if path := os.environ.get(STEPS_FILE):
                _replace(Path(path), f"{self.step_cpu_s:.6f}")
            self._delays.write()
        return outputs


def _replace(path: Path, text: str) -> None:
    """Write a file that its reader never sees half written."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
