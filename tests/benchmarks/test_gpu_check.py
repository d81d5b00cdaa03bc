"""The check for machines with a GPU runs on a CPU too, so its parts are tested without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import DeviceType

import benchmarks.gpu.parts.engine.tokens as tokens
import benchmarks.gpu.parts.kernels.cuda_graphs as cuda_graphs
from benchmarks.gpu.engines import generate, loaded, timed_steps
from benchmarks.gpu.inputs.attention_cases import serving_cases
from benchmarks.gpu.inputs.paged_batch import PADDING, HeadShape, chunked_reference, make_inputs, worst_error
from benchmarks.gpu.inputs.token_model import Judge, make_prompts, save_model
from benchmarks.gpu.parts import checkpoint
from benchmarks.gpu.parts.engine import offline, speculation
from benchmarks.gpu.parts.kernels import attention
from benchmarks.gpu.run.part import PartResults, read_results
from benchmarks.gpu.run.part_run import PartRun
from benchmarks.gpu.sizes import FULL
from benchmarks.gpu.timing.floors import Limits, decode_step, prefill
from benchmarks.gpu.timing.kernel_groups import KernelTime, busy_us, group_of, table
from benchmarks.gpu.timing.profile import _read
from benchmarks.machine import median_seconds
from kernels.attention import reference
from kernels.attention.cpu_backend import CpuBackend

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture
def part(tmp_path: Path) -> PartRun:
    return PartRun("cpu", "tiny", tmp_path, PartResults(tmp_path / "part.json"))


def outcome(part: PartRun) -> tuple[dict[str, Any], list[str]]:
    part.results.finish()
    return read_results(part.work / "part.json")


@pytest.mark.long
def test_parts_run_on_the_cpu_and_their_figures_are_in_the_json(tmp_path: Path) -> None:
    out = tmp_path / "results" / "check.json"
    command = [sys.executable, "-m", "benchmarks.gpu.check", "--device", "cpu", "--size", "tiny", "--out", str(out)]
    command += ["--parts", "store_kvcache", "decode_0.6b", "--work", str(tmp_path / "work")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    assert document["passed"]
    assert document["complete"]
    parts = {name: part["figures"] for name, part in document["parts"].items()}
    assert list(parts) == ["limits", "store_kvcache", "checkpoint_0.6b", "decode_0.6b"]
    assert parts["limits"]["machine"]["versions"]["torch"]
    assert parts["store_kvcache"]["cases"] == 54
    for batch in ("batch 1", "batch 4"):
        assert parts["decode_0.6b"][batch]["share_of_limit"] > 0
        assert parts["decode_0.6b"][batch]["engine_milliseconds"]["forward"] > 0
    assert "decode_0.6b" in done.stdout.splitlines()[-4]  # the table comes last


# --- attention --------------------------------------------------------------------------------------------------


def test_attention_passes_and_fails_where_a_kernel_is_wrong(part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    attention.serving_shapes(part)
    figures, faults = outcome(part)
    assert not faults
    assert figures["cpu"]["compared"] == 16
    # 0.55 on CPUs that multiply bfloat16 (AVX512_BF16), whose kernel rounds the weights of the values; else below 0.5
    assert 0 < figures["cpu"]["worst_share_of_tolerance"] < 0.6
    monkeypatch.setattr(CpuBackend, "forward", lambda self, inputs: torch.zeros_like(inputs.query))
    attention.odd_shapes(part)
    assert len(outcome(part)[1]) > 50


@pytest.mark.parametrize("option", ["softcap", "sinks"])
def test_an_option_of_attention_that_a_backend_ignores_is_found(
    part: PartRun, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    forward = CpuBackend.forward
    without = {option: None}
    monkeypatch.setattr(CpuBackend, "forward", lambda self, inputs: forward(self, replace(inputs, **without)))
    attention.odd_shapes(part)
    faults = outcome(part)[1]
    assert len(faults) >= 10
    assert all(option in fault for fault in faults)


def test_the_reference_in_slices_equals_the_whole_one() -> None:
    lengths = [(1, 40), (33, 70), PADDING, (7, 7)]
    for window in (None, 9):
        inputs = make_inputs(lengths, HeadShape(4, 2, 16, 4, torch.float32), CPU, window=window)
        assert torch.equal(chunked_reference(inputs, scores_bytes=8 * 4 * 70 * 5), reference.attention(inputs))
        assert inputs.key_cache.isnan().any()  # slots that no token owns


def test_one_wrong_block_in_a_long_context_exceeds_the_tolerance() -> None:
    inputs = make_inputs([(1, 8192)], HeadShape(4, 2, 64, 16), CPU)
    expected = chunked_reference(inputs)
    assert worst_error(expected, expected) == 0
    tables = inputs.metadata.block_tables.clone()
    tables[0, 5] = tables[0, 6]
    wrong = chunked_reference(replace(inputs, metadata=replace(inputs.metadata, block_tables=tables)))
    assert worst_error(wrong, expected) > 2
    assert worst_error(expected * torch.nan, expected) == float("inf")


@pytest.mark.parametrize("heads", FULL.attention)
def test_the_serving_cases_launch_every_kernel(heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of a few dozen tokens would never be split."""
    pytest.importorskip("triton")
    from kernels.attention.triton import backend, decode, prefill

    launched: set[str] = set()
    for module in (prefill, decode):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:

            def record(*arguments: Any, name: str = name, **options: Any) -> None:
                launched.add(name)

            monkeypatch.setattr(getattr(module, name), "run", record)
    for case in serving_cases(FULL.context):
        for window in case.windows:
            small = make_inputs([(query, min(seq, 1)) for query, seq in case.lengths], HeadShape(*heads, 16), CPU)
            metadata = replace(small.metadata, max_seq_len=max(seq_len for _, seq_len in case.lengths))
            backend.TritonBackend().forward(replace(small, metadata=metadata, window=window))
    assert launched == {"prefill_kernel", "plan_splits_kernel", "split_decode_kernel", "reduce_splits_kernel"}


def test_a_replay_that_computes_nothing_is_found(part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_graphs.run(part)
    figures, faults = outcome(part)
    assert not faults
    assert len(figures) == 2 + 4

    def stale(run: Any, device: torch.device) -> Any:
        run()
        return lambda: None

    monkeypatch.setattr(cuda_graphs, "captured", stale)
    cuda_graphs.run(part)
    assert len(outcome(part)[1]) == 4


# --- tokens -----------------------------------------------------------------------------------------------------


def test_the_tolerance_of_tokens_rejects_second_best_ones(tmp_path: Path) -> None:
    save_model(tmp_path)
    for dtype, share in (("float32", 0.98), ("bfloat16", 0.8)):
        judge = Judge(tmp_path, dtype, CPU)
        prompts = make_prompts(8, 60)
        best: list[list[int]] = []
        for prompt in prompts:
            best.append([])
            for _ in range(4):
                logits = judge._logits(judge._exact, tuple(prompt), (*best[-1], 0))
                best[-1].append(int(logits[-1].argmax()))
        judged = judge.judge(prompts, best)
        assert judged.shortfall == judged.above == judged.not_first == 0
        second = []
        for prompt, answer in zip(prompts, best, strict=True):
            logits = judge._logits(judge._exact, tuple(prompt), tuple(answer))
            second.append([*answer[:-1], int(logits[-1].topk(2).indices[1])])
        judged = judge.judge(prompts, second)
        assert judged.above >= share / 4  # one token in four was replaced
        assert judged.not_first == 0.25


@pytest.mark.long
def test_tokens_pass_and_an_unfound_planted_fault_fails(part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tokens.FAULTS, "none", lambda plan: plan)
    tokens.run(part, "float32")
    figures, faults = outcome(part)
    assert faults == ["cpu, planted: none: only 0.0% of the tokens are found wrong"]
    assert figures["cpu, default"]["cached_tokens"] > 0
    assert figures["cpu, drafts"]["accepted_draft_tokens"] > 0
    for name in tokens.FAULTS.keys() - {"none"}:
        assert figures[f"cpu, planted: {name}"]["above"] > 0.1


@pytest.mark.long
def test_wrong_tokens_fail(part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "FAULTS", {})
    monkeypatch.setattr(CpuBackend, "forward", lambda self, inputs: torch.zeros_like(inputs.query))
    monkeypatch.setenv("PAGODA_CPU_KERNELS", "0")  # else C does what the backend does
    from kernels.cpu import library

    library.library.cache_clear()
    try:
        tokens.run(part, "float32")
    finally:
        library.library.cache_clear()
    assert any("below the most likely token" in fault for fault in outcome(part)[1])


# --- floors -----------------------------------------------------------------------------------------------------


def test_floors_are_those_of_the_shapes() -> None:
    limits = Limits(copy_gb_s=4200, bf16_tflop_s=780)
    small, large = FULL.models["0.6b"], FULL.models["8b"]
    floors = [
        1e3 * decode_step(shape, batch, 1024).floor_s(limits) for shape in (small, large) for batch in (1, 16, 256)
    ]
    assert floors == pytest.approx([0.31, 0.73, 7.4, 3.65, 4.2, 12.8], rel=0.03)
    fp8 = decode_step(large, 256, 1024, kv_cache_dtype="fp8")
    assert decode_step(large, 256, 1024).num_bytes - fp8.num_bytes == 256 * 1024 * large.kv_bytes_per_token / 2
    long = prefill(large, 1, 8192)
    assert long.floor_s(limits) == pytest.approx(2 * 8192 * large.layer_parameters / 780e12, rel=0.2)
    assert long.flop > 2 * 8192 * large.layer_parameters
    figures = decode_step(small, 1, 1024).figures(2 * floors[0] / 1e3, limits)
    assert figures["share_of_limit"] == pytest.approx(0.5)


def test_the_floor_of_an_offline_run_counts_each_decode_step() -> None:
    limits, shape = Limits(1000, 1e6), FULL.models["0.6b"]
    steps = [decode_step(shape, 2, 12).floor_s(limits), decode_step(shape, 1, 15).floor_s(limits)]
    assert offline.floor_s(shape, [(10, 2), (12, 3)], limits) == pytest.approx(sum(steps), rel=1e-2)


# --- timing -----------------------------------------------------------------------------------------------------


def test_median_seconds_measures_the_calls_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now, durations = 0, [500, 10, 70, 20]

    def call() -> None:
        nonlocal now
        now += durations.pop(0)

    monkeypatch.setattr("benchmarks.machine.perf_counter", lambda: now)
    assert median_seconds(call, CPU, warmup=1, repeats=3) == 20
    assert not durations


def test_the_memory_of_a_model_is_free_while_the_caller_holds_the_llm(part: PartRun) -> None:
    checkpoint.run(part, "0.6b")
    with loaded(part, "0.6b") as llm:
        generate(llm, [[11, 12]], [2])
        worker = llm.engine.runner.workers.local  # type: ignore[attr-defined]
        alive = [weakref.ref(worker.kv_cache), weakref.ref(worker.shard.model)]
        del worker
    assert llm is not None
    assert [item() for item in alive] == [None, None]


def test_timed_steps_measure_the_engines_steps(part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    now, durations = 0, [200] * 3 + [20, 40, 60]  # the warm-up does not count

    def step() -> None:
        nonlocal now
        now += durations.pop(0)

    monkeypatch.setattr("benchmarks.gpu.engines.perf_counter", lambda: now)
    engine = SimpleNamespace(step=step, observers=SimpleNamespace(members=[]))
    assert timed_steps(part, engine, 3)[0] == 40  # type: ignore[arg-type]
    assert not durations
    assert engine.observers.members == []


# --- the table of a step's time ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "range", "group"),
    [
        ("nvjet_sm90_tst_64x8", None, "linear"),
        ("void cutlass::Kernel2<cutlass_80_wmma>", "rotary", "linear"),
        ("split_decode_kernel", "rotary", "attention"),
        ("linear_kernel", "attention", "linear"),
        ("coded_linear_kernel", "feed_forward", "linear"),
        ("add_parts_kernel", "attention", "linear"),
        ("grouped_linear_kernel", "feed_forward", "experts"),
        ("group_kernel", "feed_forward", "experts"),
        ("_store_kernel", "rotary", "store_kvcache"),
        ("delta_rule_kernel", None, "recurrent"),
        ("carry_states_kernel", None, "recurrent"),
        ("index_scores_kernel", None, "attention"),
        ("conv_sequence_kernel", None, "recurrent"),
        ("void cub::DeviceScan_scan_kernel", None, "other"),
        ("void at::native::elementwise_kernel<128>", "rotary", "rotary"),
        ("void at::native::elementwise_kernel<128>", "sampling", "sampling"),
        ("nvjet_sm90_tst_64x8", "sampling", "sampling"),
        ("Memcpy HtoD (Pinned -> Device)", None, "copies"),
        ("triton_fused_norm", None, "norm"),
        ("void at::native::vectorized_elementwise_kernel<4>", None, "other"),
    ],
)
def test_a_kernels_group(name: str, range: str | None, group: str) -> None:
    assert group_of(KernelTime(name, 0, 1, range)) == group


def test_the_table_sums_times_by_group_and_counts_overlaps_once() -> None:
    kernels = [KernelTime("gemm", 0, 2000), KernelTime("gemm", 1000, 3000), KernelTime("Memcpy", 5000, 6000)]
    rows = table(kernels, num_steps=2)
    assert rows["groups"] == {
        "linear": {"milliseconds": 2.0, "launches": 1.0},
        "copies": {"milliseconds": 0.5, "launches": 0.5},
    }
    assert [item["name"] for item in rows["kernels"]] == ["gemm", "Memcpy"]
    assert busy_us(kernels) == 4000


def test_the_profilers_events_become_kernels_and_host_calls() -> None:
    def event(name: str, device: DeviceType, start: float = 0, end: float = 0, **more: Any) -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end)
        fields = {"name": name, "device_type": device, "time_range": span, "kernels": [], "cpu_parent": None}
        return SimpleNamespace(**(fields | more))

    outer, other = event("step: norm", DeviceType.CPU), event("step: rotary", DeviceType.CPU)
    launched = [SimpleNamespace(name="elementwise", duration=duration) for duration in (5, 7, 9)]
    events = [
        outer,
        other,
        event("aten::mul", DeviceType.CPU, kernels=launched[:1], cpu_parent=outer),
        event("aten::mul", DeviceType.CPU, kernels=launched[1:2], cpu_parent=other),
        event("aten::mul", DeviceType.CPU, kernels=launched[2:]),
        event("cudaLaunchKernel", DeviceType.CPU),
        event("elementwise", DeviceType.CUDA, 10, 15),
        event("elementwise", DeviceType.CUDA, 15, 22),
        event("elementwise", DeviceType.CUDA, 22, 31),
        event("elementwise", DeviceType.CUDA, 31, 32),  # by what is unknown
        event("step: norm", DeviceType.CUDA, 10, 15),  # the range as it appears on the GPU
    ]
    profile = _read(events)
    assert [kernel.range for kernel in profile.kernels] == ["norm", "rotary", None, None]
    assert profile.kernels[1] == KernelTime("elementwise", 15, 22, "rotary")
    assert profile.host_calls == {"cudaLaunchKernel": 1}


@pytest.mark.long
def test_drafts_of_a_smaller_model_are_measured_at_each_acceptance(part: PartRun) -> None:
    for name in ("0.6b", "8b"):
        checkpoint.run(part, name)
    speculation.run(part, "8b", "0.6b")
    figures, faults = outcome(part)
    assert not faults
    assert figures["share_of_bytes"] == 1.0  # tiny models of one shape
    gains = [value for name, value in figures.items() if " streams, " in name]
    assert [(gain["streams"], gain["workload"]) for gain in gains] == [
        (streams, f"draft model {percent}%") for streams in (1, 2) for percent in (90, 80, 70, 50)
    ]
    assert all(gain["off_tokens_per_s"] > 0 < gain["on_tokens_per_s"] for gain in gains)
    assert len(figures["summary"]) == len(gains)
