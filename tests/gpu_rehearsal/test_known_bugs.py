"""Bugs that a review found in the GPU path: the rehearsal passes without each, and fails with it put back.

A check stands above its bug: the check alone shows that the bug is gone, and the test with "again" that the check is no
formality.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from typing import Any

import pytest
import torch

from deployments.config import AppConfig
from engine.errors import ConfigError
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import StepTimes
from engine.worker.step_timer import StepTimer
from tests.gpu_rehearsal.code_lines import ROOT
from tests.gpu_rehearsal.machine import RehearsalError
from tests.gpu_rehearsal.rehearsal import Rehearsal
from tests.waiting import HANG_S

# --- the device of an engine with one GPU had no index, which torch.cuda.set_device refuses -------------------------


@pytest.mark.parametrize(("option", "device"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
def test_an_engine_loads_on_its_gpu(option: str, device: str, gpu: Rehearsal) -> None:
    llm = gpu.start(device=option, enforce_eager=True)
    assert llm.engine.info.device == device
    llm.generate([{"prompt_token_ids": [20, 30]}], SamplingParams(max_tokens=2), use_tqdm=False)
    gpu.machine.check()


def test_a_device_without_an_index_again(gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.worker.model_shard.resolve_device", lambda config, rank: torch.device("cuda"))
    with pytest.raises(ValueError, match="Expected a torch.device with a specified index"):
        gpu.start()


# --- the extra "gpu" named flash-attn, which has no wheel on PyPI ---------------------------------------------------


def pip_resolves(requirements: list[str]) -> subprocess.CompletedProcess[str]:
    """Ask pip for wheels of these requirements, without downloading what they require in turn."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    return subprocess.run(
        [*command, "--only-binary=:all:", "--disable-pip-version-check", *requirements],
        capture_output=True,
        text=True,
        timeout=8 * HANG_S,
        check=False,
    )


def check_wheels(requirements: list[str]) -> None:
    result = pip_resolves(requirements)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def package_index() -> None:
    if pip_resolves(["tqdm"]).returncode != 0:
        pytest.skip("pip reaches no package index")


@pytest.mark.usefixtures("package_index")
def test_the_extra_gpu_installs_from_wheels() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    check_wheels(project["optional-dependencies"]["gpu"])


@pytest.mark.usefixtures("package_index")
def test_an_extra_without_wheels_again() -> None:
    with pytest.raises(AssertionError, match="flash-attn"):
        check_wheels(["triton>=3.6", "flash-attn>=2.8"])


# --- kernels were compiled while serving ----------------------------------------------------------------------------


def test_a_warm_up_without_every_launch_again(gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """test_compilations.py has the check."""
    monkeypatch.setattr("kernels.attention.triton.backend.TritonBackend.warm_up_batches", lambda self, limits: [])
    llm = gpu.start(enforce_eager=True)
    llm.generate([{"prompt_token_ids": [20, 30]}], SamplingParams(max_tokens=4), use_tqdm=False)
    with pytest.raises(
        RehearsalError, match=r"plan_splits_kernel is compiled while .* at kernels/attention/triton/backend"
    ):
        gpu.machine.check()


# --- an explicit share of a GPU skipped the guard on kv_cache_memory ------------------------------------------------


def check_shared_gpu() -> None:
    """Two engines on one GPU need configured sizes."""
    arguments: dict[str, Any] = {
        "model": "m",
        "engine": {"device": "cuda"},
        "replicas": {"num_engine_replicas": 2, "gpus_per_engine": 0.5},
    }
    with pytest.raises(ConfigError, match="engine.kv_cache_memory"):
        AppConfig.parse(arguments)
    arguments["engine"]["kv_cache_memory"] = "1GiB"
    assert AppConfig.parse(arguments).gpus_per_engine(1.0) == 0.5


def test_a_shared_gpu_needs_configured_sizes() -> None:
    check_shared_gpu()


def test_a_share_without_a_guard_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.config.require_valid_gpus_per_engine", lambda gpus, engine: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_shared_gpu()


# --- a step's forward time ended when the host had queued the forward pass ------------------------------------------


def check_step_times(gpu: Rehearsal) -> None:
    """The simulated GPU lags behind the host, so the forward pass lasts longer than queueing it."""
    llm = gpu.start()
    runner: Any = llm.engine.runner
    clock, run, execute = gpu.machine.clock, runner.run, runner.workers.execute
    shares: list[float] = []

    def timed_execute(*args: Any) -> Any:
        started = max(clock.now, clock.done_at[0])
        result = execute(*args)
        timed_execute.seconds = clock.done_at[0] - started  # type: ignore[attr-defined]
        return result

    def timed_run(output: Any, times: StepTimes) -> Any:
        started = clock.now
        sampled = run(output, times)
        shares.append(times.forward / timed_execute.seconds)  # type: ignore[attr-defined]
        assert times.forward + times.sample == pytest.approx(clock.now - started, rel=0.05)
        return sampled

    runner.run, runner.workers.execute = timed_run, timed_execute
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=4, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [20, 30, 40]}], params, use_tqdm=False)
    gpu.machine.check()
    assert shares == pytest.approx([1.0] * len(shares), rel=0.1)


def test_the_forward_time_covers_the_gpu(gpu: Rehearsal) -> None:
    check_step_times(gpu)


def test_a_forward_time_of_the_host_again(gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(timer: Any, times: StepTimes) -> None:
        now = gpu.machine.clock.perf_counter()
        times.forward = timer._forward_queued - timer._started
        times.sample = now - timer._forward_queued

    monkeypatch.setattr(StepTimer, "stop", stop)
    with pytest.raises(AssertionError, match="comparison failed"):
        check_step_times(gpu)
