"""The parts of the GPU check that are about memory: the largest steps, and kernels under NVIDIA's sanitizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.parts import checkpoint, memcheck
from benchmarks.gpu.parts.engine import largest_step
from benchmarks.gpu.run.part import PartResults, read_results, write_json
from benchmarks.gpu.run.part_run import PartRun
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler

STORE = "benchmarks.gpu.parts.kernels.store_kvcache:run"
# What memcheck prints of a kernel that reads beyond a tensor.
REPORT = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at prefill_kernel+0x1d0
=========     by thread (3,0,0) in block (0,0,0)
========= ERROR SUMMARY: 1 error"""


class OnGpu(PartRun):
    """A part that takes the CPU for a GPU."""

    on_gpu = True  # type: ignore[assignment]


def outcome(part: PartRun) -> tuple[dict[str, Any], list[str]]:
    part.results.finish()
    return read_results(part.work / "part.json")


@pytest.fixture
def part(tmp_path: Path) -> PartRun:
    return PartRun("cpu", "tiny", tmp_path, PartResults(tmp_path / "part.json"))


@pytest.fixture
def gpu_part(tmp_path: Path) -> PartRun:
    write_json(tmp_path / "limits.json", {"complete": True, "faults": [], "figures": {}})
    return OnGpu("cpu", "tiny", tmp_path, PartResults(tmp_path / "part.json"))


# --- the largest steps ----------------------------------------------------------------------------------------------


def test_steps_are_as_large_as_the_options_allow(part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, steps = Scheduler.schedule, set[tuple[int, int, int]]()

    def noted(scheduler: Scheduler, *args: Any) -> Any:
        output = schedule(scheduler, *args)
        steps.add((output.num_tokens, len(output.sequences), len(output.sampling)))
        return output

    monkeypatch.setattr(Scheduler, "schedule", noted)
    checkpoint.run(part, "0.6b")
    largest_step.run(part, "0.6b")
    figures, faults = outcome(part)
    assert not faults
    assert figures["all prompts in one step"]["answers"] == part.sizes.decode_batches[-1]
    budget, num_seqs = part.sizes.max_num_batched_tokens, part.sizes.decode_batches[-1]
    assert (budget, num_seqs, num_seqs) in steps  # all prompts end in it
    assert (budget, num_seqs, num_seqs - 1) in steps  # decodes, and a chunk of a prompt
    assert (budget, 1, 1) in steps  # a prompt's log-probabilities


def test_answers_that_fail_are_a_fault(part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Sampler.start
    monkeypatch.setattr(Sampler, "start", lambda self, logits, *args: start(self, logits.fill_(torch.nan), *args))
    checkpoint.run(part, "0.6b")
    largest_step.run(part, "0.6b")
    assert outcome(part)[1][0] == "all prompts in one step: 4 answers did not come to their end"


@pytest.mark.parametrize(("peak", "faults"), [(70, 0), (85, 0), (86, 1)])
def test_more_memory_than_is_allowed_is_a_fault(
    peak: int, faults: int, gpu_part: PartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 GiB 5 are other processes', and 90 may be used."""
    unit = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * unit, 100 * unit))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 93 * unit)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak * unit)
    llm: Any = type("Llm", (), {"config": type("Config", (), {"gpu_memory_utilization": 0.9})})
    largest_step._judge(gpu_part, llm)
    figures, found = outcome(gpu_part)
    assert figures["share of memory"] == {"peak": pytest.approx((peak + 5) / 100), "allowed": 0.9}
    assert len(found) == faults


# --- compute-sanitizer ----------------------------------------------------------------------------------------------


def put_tool(path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Make a script the sanitizer; its arguments after the eighth are the command that it watches."""
    path.mkdir()
    tool = path / memcheck.TOOL
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")


def test_a_part_runs_under_the_sanitizer(tmp_path: Path, gpu_part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    put_tool(tmp_path / "bin", monkeypatch, 'echo "$1 $2 $3 $4 $7 $8" > "$0.log"; shift 8; exec "$@"')
    memcheck.run(gpu_part, [STORE])
    assert outcome(gpu_part) == ({STORE: {"errors": 0, "exit_code": 0}}, [])
    options = (tmp_path / "bin" / "compute-sanitizer.log").read_text()
    assert options == "--tool memcheck --error-exitcode 86 --report-api-errors no\n"
    figures, faults = read_results(tmp_path / "memcheck" / f"{STORE.replace(':', '.')}.json")
    assert figures["cases"] == 54
    assert not faults


def test_what_the_sanitizer_finds_is_a_fault(
    tmp_path: Path, gpu_part: PartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_tool(tmp_path / "bin", monkeypatch, f"shift 8; \"$@\"; cat <<'END'\n{REPORT}\nEND\nexit 86")
    memcheck.run(gpu_part, [STORE])
    figures, faults = outcome(gpu_part)
    assert figures[STORE] == {"errors": 1, "exit_code": 86}
    assert faults == [f"{STORE}: Invalid __global__ read of size 4 bytes at prefill_kernel+0x1d0"]


def test_an_error_outside_a_kernel_is_a_fault(
    tmp_path: Path, gpu_part: PartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = 'Program hit cudaErrorInvalidValue (error 1) due to "invalid argument" on CUDA API call to cudaMemcpyAsync.'
    report = f"========= {call}\n=========     Saved host backtrace up to driver entry point at error\n{REPORT}"
    put_tool(tmp_path / "bin", monkeypatch, f"cat <<'END'\n{report}\nEND\nexit 86")
    memcheck.run(gpu_part, [STORE])
    assert outcome(gpu_part)[1][:2] == [  # then, that the part has not run
        f"{STORE}: {call}",
        f"{STORE}: Invalid __global__ read of size 4 bytes at prefill_kernel+0x1d0",
    ]


def test_a_sanitizer_that_fails_is_a_fault(tmp_path: Path, gpu_part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    put_tool(tmp_path / "bin", monkeypatch, "exit 1")
    memcheck.run(gpu_part, [STORE])
    faults = outcome(gpu_part)[1]
    assert faults[0] == f"{STORE}: compute-sanitizer ended with exit code 1"
    assert "cannot be read" in faults[1]  # the part has not run


def test_it_is_skipped_without_the_tool_or_a_gpu(
    tmp_path: Path, part: PartRun, gpu_part: PartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(memcheck, "USUAL_PLACE", tmp_path / "none")
    memcheck.run(gpu_part, [STORE])
    figures, faults = outcome(gpu_part)
    assert "no compute-sanitizer" in figures["skipped"]
    assert not faults
    memcheck.run(part, [STORE])
    assert outcome(part)[0]["skipped"] == "there is no GPU"
