"""The benchmarks of the engine, on the demo model and on tiny workloads."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import adapter, kv_cache_curves, latency, loading, step_profile, throughput
from benchmarks.engine_options import add_engine_arguments, engine_options
from benchmarks.limits.linear_rates import linears, measure_rates
from benchmarks.limits.model_shape import ModelShape
from benchmarks.peers import runner
from benchmarks.workloads import Request, Workload
from engine.engine import Engine
from engine.models.decoder import cpu_decoder
from engine.sampling.pending import PendingTokens
from engine.sampling.sampler import Sampler
from engine.worker.model_runner import ModelRunner
from kernels.cpu.library import library

MODEL = str(Path(__file__).parents[2] / "demo" / "model")
SMALL = ["--model", MODEL, "--max-model-len", "256", "--engine-option", "kv_cache_memory=4MiB", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_throughput_counts_every_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "small.json", tmp_path / "result.json"
    Workload("small", [Request([5, 6, 7], 3), Request([8, 9], 2)]).write(file)
    throughput.main([str(file), str(file), *SMALL, "--json-lines", "--out", str(out)])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kept = json.loads(out.read_text())
    assert kept["results"] == printed
    sizes = [(item["workload"], item["input_tokens"], item["output_tokens"]) for item in printed]
    assert sizes == [("small", 5, 5)] * 2
    assert kept["options"]["kv_cache_memory"] == "4MiB"
    assert "quantization" not in kept["options"]


def test_latency_times_each_decode_step(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    latency.main([*SMALL, "--context", "8", "100", "--tokens", "4", "--out", str(out)])
    results = json.loads(out.read_text())["results"]
    assert [result["context"] for result in results] == [8, 100]
    assert all(result["ttft_s"] > 0 and 0 < result["tpot_median_ms"] <= result["tpot_p99_ms"] for result in results)
    for result in results:
        assert result["over_limit"] == pytest.approx(result["plain_read_gb_s"] / result["read_gb_s"], rel=0.1)


@pytest.mark.exhaustive("runs a benchmark whole; its arithmetic and its reading have tests of their own")
def test_loading_is_measured_beside_plain_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out, dropped = tmp_path / "model", tmp_path / "result.json", []
    shutil.copytree(MODEL, model)
    monkeypatch.setattr(loading, "drop_from_page_cache", dropped.append)  # which a file system in memory cannot
    loading.main(["--model", str(model), "--rounds", "2", "--out", str(out)])
    results = json.loads(out.read_text())["results"]
    assert [(result["stored"], result["loaded"], result["by"]) for result in results] == [
        (stored, loaded, by)
        for stored, loaded in (("bfloat16", "bfloat16"), ("float32", "float32"), ("float32", "bfloat16"))
        for by in ("pagoda", "transformers")
    ]
    for result in results:
        for index, name in enumerate(("over_disk", "over_kept")):
            ratios = [of_round[2]["seconds"] / of_round[index]["seconds"] for of_round in result["runs"]]
            assert result[name] == pytest.approx(sum(ratios) / 2, rel=0.01)
    num_plain_runs = 2 * 3 * len(loading.PLAIN)  # to find the fastest way, for each stored dtype
    assert len(dropped) == num_plain_runs + len(results) * 2 * 3
    assert list(tmp_path.iterdir()) == [model, out] or list(tmp_path.iterdir()) == [out, model]


def test_plain_reading_reads_every_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, read, preadv = [tmp_path / "a", tmp_path / "b"], [], os.preadv
    for path, size in zip(paths, (10_000, 4096), strict=True):
        path.write_bytes(os.urandom(size))

    def recorded(file: int, buffers: list[memoryview], start: int) -> int:
        count = preadv(file, buffers, start)
        read.append(bytes(buffers[0][:count]))
        return count

    monkeypatch.setattr(os, "preadv", recorded)
    assert loading.plain_read(paths, threads=3, block_bytes=1024) == []
    expected = [data[i : i + 1024] for data in (path.read_bytes() for path in paths) for i in range(0, len(data), 1024)]
    assert sorted(read) == sorted(expected)
    kept = loading.plain_read(paths, threads=3, block_bytes=1024, keep=True)
    assert [bytes(item.numpy()) for item in kept] == [path.read_bytes() for path in paths]


def test_each_implementation_decodes_the_same_streams(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    adapter.main([*SMALL, "--streams", "1", "2", "--steps", "3", "--out", str(out)])
    by_streams = json.loads(out.read_text())["by_streams"]
    assert list(by_streams) == ["1", "2"]
    for by_stream in by_streams.values():
        assert set(by_stream) == {"transformers", "torch", "C"}
        assert by_stream["transformers"]["ratio"] == 1
        assert all(figures["step_median_ms"] > 0 for figures in by_stream.values())


def test_the_curves_have_a_time_for_every_token(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    kv_cache_curves.main([*SMALL, "--prompt-tokens", "8", "--tokens", "9", "--stride", "4", "--out", str(out)])
    result = json.loads(out.read_text())
    assert len(result["with_cache_s"]) == len(result["without_cache_s"]) == 9
    assert set(result["ratio_by_tokens"]) == {"9"}


def test_workloads_of_one_process_get_other_ids() -> None:
    seen: list[list[int]] = []

    def load(model: str, workloads: list[Workload]) -> runner.Generate:
        def generate(requests: list[Request]) -> int:
            seen.append(requests[0].prompt)
            return sum(request.out for request in requests)

        return generate

    results = list(runner.run_workloads("fake", "model", load, [Workload("a", [Request([10, 11], 2)])] * 2))
    assert seen == [runner.WARM_UP[0].prompt, [10, 11], [11, 12]]
    assert [result["engine"] for result in results] == ["fake", "fake"]


def test_an_engine_that_stops_early_gives_no_result() -> None:
    with pytest.raises(RuntimeError, match="x: 1 tokens came and 2 were asked for"):
        runner.measure(lambda requests: 1, Workload("x", [Request([1], 2)]))


def test_engine_options_are_yaml() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    given = ["--model", "m", "--quantization", "int8", "--engine-option", "enable_prefix_caching=false"]
    options = engine_options(parser.parse_args(given))
    assert (options["quantization"], options["enable_prefix_caching"]) == ("int8", False)
    with pytest.raises(ValueError, match="is no KEY=VALUE"):
        engine_options(parser.parse_args(["--model", "m", "--engine-option", "seed"]))


def test_rates_of_small_linears_are_measured() -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this machine has no bf16 linears")
    shape = ModelShape(64, 128, 1, 4, 2, 16, 256)
    for pack, weight_bytes in linears().values():
        rates = measure_rates(shape, pack, weight_bytes, rows=(1, 4), min_weights=1 << 16)
        assert rates.weights_gb_s > 0
        assert set(rates.gflop_s) == {1, 4}


@pytest.mark.skipif(library() is None, reason="no C compiler is installed")
def test_a_step_profile_has_every_step_and_restores_the_engine(tmp_path: Path) -> None:
    def replaced() -> list[Any]:
        of_engine = [Engine.step, ModelRunner.run, Sampler.start, PendingTokens.finish]
        return [*of_engine, cpu_decoder.all_layers, cpu_decoder.logits]

    file, out = tmp_path / "small.json", tmp_path / "profile.json"
    Workload("small", [Request(list(range(5, 75)), 3), Request([8, 9], 6)]).write(file)
    before = replaced()
    step_profile.main([str(file), *SMALL, "--out", str(out)])
    assert replaced() == before
    (result,) = json.loads(out.read_text())["results"]
    # Both prompts together, two steps of both answers, three more of the longer one.
    assert [(row["tokens"], row["steps"]) for row in result["steps"]] == [("1", 3), ("2-4", 2), ("over 64", 1)]
    assert all(row[f"{part}_ms"] > 0 for row in result["steps"] for part in step_profile.PARTS)
    timed = sum(row[f"{part}_s"] for row in result["steps"] for part in step_profile.PARTS)
    assert 0.3 * result["seconds"] < timed < result["seconds"] + 0.01


def test_a_step_profile_needs_the_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.json"
    Workload("small", [Request([8, 9], 2)]).write(file)
    with pytest.raises(SystemExit):
        step_profile.main([str(file), *SMALL, "--dtype", "float16"])
    assert "a C compiler" in capsys.readouterr().err
