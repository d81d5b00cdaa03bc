"""Step times are the device's own, and a step ends when its device is done and its ranks are alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine.errors import EngineDeadError
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput, StepTimes
from engine.worker import model_runner, step_timer, worker_pool
from engine.worker.step_timer import StepTimer
from engine.worker.worker_pool import WorkerPool
from tests.engine.conftest import SavedModel

GPU = torch.device("cuda", 0)


class Gpu:
    """A queue of work and a clock, in seconds. Recording an event takes no time; only waiting for the queue does."""

    def __init__(self) -> None:
        self.now = 0.0  # on the host
        self.idle_at = 0.0  # when the queue is empty

    def queue(self, seconds: float) -> None:
        self.idle_at = max(self.now, self.idle_at) + seconds

    def synchronize(self) -> None:
        self.now = max(self.now, self.idle_at)


class Event:
    """A torch.cuda.Event of a Gpu."""

    def __init__(self, *, enable_timing: bool, blocking: bool) -> None:
        assert enable_timing
        assert blocking
        self.at = float("nan")

    def record(self, gpu: Gpu) -> None:
        self.gpu, self.at = gpu, max(gpu.now, gpu.idle_at)

    def synchronize(self) -> None:
        self.gpu.now = max(self.gpu.now, self.at)

    def elapsed_time(self, end: Event) -> float:
        assert end.at <= self.gpu.now, "an event is read that the device has not reached"
        return (end.at - self.at) * 1e3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Make every GPU that fake, and the host's clock its clock."""
    fake = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake)
    monkeypatch.setattr(step_timer, "perf_counter", lambda: fake.now)
    return fake


def test_the_forward_pass_of_a_gpu_ends_when_the_gpu_ends_it(gpu: Gpu) -> None:
    for forward, sample in ((0.25, 0.5), (2.0, 0.125)):
        timer, times = StepTimer(GPU), StepTimes()
        gpu.queue(forward)
        gpu.now += 0.0625  # the host queues what follows
        timer.forward_queued()
        gpu.queue(sample)
        timer.step_queued()
        gpu.synchronize()
        timer.step_done()
        timer.stop(times)
        assert (times.forward, times.sample) == (forward, sample)


def test_a_step_that_is_queued_while_another_one_runs_takes_its_own_time(gpu: Gpu) -> None:
    steps = [(StepTimes(), 1.0, 0.5), (StepTimes(), 2.0, 0.25)]
    timers = []
    for _, forward, sample in steps:
        timers.append(StepTimer(GPU))
        gpu.queue(forward)
        timers[-1].forward_queued()
        gpu.queue(sample)
        timers[-1].step_queued()
    gpu.queue(4.0)
    for timer, (times, forward, sample) in zip(timers, steps, strict=True):
        assert timer.end is not None
        timer.end.synchronize()
        timer.step_done()
        timer.stop(times)
        assert (times.forward, times.sample) == (forward, sample)
    assert gpu.now == 3.75


def test_on_a_cpu_the_host_computes_the_forward_pass(gpu: Gpu) -> None:
    timer, times = StepTimer(torch.device("cpu")), StepTimes()
    gpu.now += 0.5
    timer.forward_queued()
    gpu.now += 0.25
    timer.step_queued()
    assert timer.end is None
    timer.step_done()
    timer.stop(times)
    assert (times.forward, times.sample) == (0.5, 0.25)


def on_fake_gpu(runner: Any, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, StepTimes]]:
    """Let a runner's steps take a second of the fake GPU; return a list that grows by their samples and times."""
    steps: list[tuple[int, StepTimes]] = []
    execute, run = runner.workers.execute, runner.run

    def queue(*args: Any) -> torch.Tensor | None:
        gpu.queue(1.0)
        return execute(*args)

    def record(output: SchedulerOutput, times: StepTimes) -> SampledTokens:
        sampled = run(output, times)
        steps.append((len(output.sampling), times))
        return sampled

    monkeypatch.setattr(model_runner, "StepTimer", lambda device: StepTimer(GPU))
    monkeypatch.setattr(runner.workers, "execute", queue)
    monkeypatch.setattr(runner, "run", record)
    return steps


def test_a_step_that_samples_nothing_takes_its_own_time(
    qwen3: SavedModel, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next step would wait for this one's chunk of a prompt."""
    llm = LLM(
        qwen3.path,
        device="cpu",
        dtype="float32",
        num_blocks=64,
        max_num_batched_tokens=16,
        long_prefill_threshold=16,
        skip_tokenizer_init=True,
    )
    steps = on_fake_gpu(llm.engine.runner, gpu, monkeypatch)
    prompt: Any = {"prompt_token_ids": list(range(3, 43))}
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert [(sampling, times.forward, times.sample) for sampling, times in steps] == [
        (0, 1.0, 0.0),
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (1, 1.0, 0.0),
    ]


# --- health ---------------------------------------------------------------------------------------------------------


class DyingRanks:
    """RemoteRanks one of which dies during a step, after ``execute`` has queued it."""

    def __init__(self) -> None:
        self.failure: EngineDeadError | None = None
        self.num_closed = 0

    def die(self) -> None:
        self.failure = EngineDeadError("tensor-parallel rank 1 of 2 was killed by signal 9; restart the engine")

    def send(self, message: object) -> None:
        """The other ranks are not there."""

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.num_closed += 1
            if self.failure is not None:
                raise self.failure from None
            raise

    def check_health(self) -> None:
        if self.failure is not None:
            raise self.failure


def aborted(device: torch.device, event: torch.cuda.Event | None) -> None:
    raise RuntimeError("NCCL communicator was aborted")


@pytest.mark.parametrize("wait", [lambda device, event: None, aborted])
def test_no_token_is_returned_of_a_step_in_which_a_rank_has_died(
    qwen3: SavedModel, monkeypatch: pytest.MonkeyPatch, wait: Callable[[torch.device, torch.cuda.Event | None], None]
) -> None:
    """With NCCL the collectives end as the communicator is aborted, and what they leave looks like logits."""
    llm = LLM(qwen3.path, device="cpu", dtype="float32", num_blocks=64, skip_tokenizer_init=True)
    runner: Any = llm.engine.runner
    ranks = DyingRanks()
    monkeypatch.setattr(runner.workers, "_ranks", ranks)
    monkeypatch.setattr(worker_pool, "wait_for_device", wait)
    execute = WorkerPool.execute

    def die_afterwards(pool: WorkerPool, *args: Any) -> torch.Tensor | None:
        logits = execute(pool, *args)
        ranks.die()
        return logits

    monkeypatch.setattr(WorkerPool, "execute", die_afterwards)
    params = SamplingParams(temperature=0.0, max_tokens=2)
    with pytest.raises(EngineDeadError, match="rank 1 of 2 was killed"):
        llm.generate([{"prompt_token_ids": [3, 4, 5]}], params, use_tqdm=False)
    assert ranks.num_closed == 1
