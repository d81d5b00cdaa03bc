"""Attention on a CPU: the C kernel and torch's operators, beside the time to read the keys and values.

    python -m benchmarks.cpu_attention [--threads 1] [--seconds 1.0] [--shapes decode verify] [--out results.json]

Blocks are scattered over the cache. Caches of 64 MiB and more come from memory, smaller ones from the processor's own
cache, where the floor, measured on 256 MiB, is none. Times are the best of many calls: other programs only add to them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.result_file import write_result
from kernels.attention.base import AttentionInputs
from kernels.attention.cpu_backend import CpuBackend
from kernels.attention_metadata import AttentionMetadata, leading_decodes
from kernels.cpu.library import library, set_num_threads

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16
SHAPES = {  # (query_len, seq_len) of each sequence
    "decode 1 x 512": [(1, 512)],
    "decode 1 x 8192": [(1, 8192)],
    "decode 16 x 200": [(1, 200)] * 16,
    "decode 16 x 1024": [(1, 1024)] * 16,
    "decode 64 x 16": [(1, 16)] * 64,
    "verify 4 over 8192": [(4, 8192)],
    "verify 8 over 8192": [(8, 8192)],
    "prefill 256 of 256": [(256, 256)],
    "prefill 256 of 2048": [(256, 2048)],
    "prefill 256 of 8192": [(256, 8192)],
    "prefill 2048 of 2048": [(2048, 2048)],
    "prefill 256 of 1024 beside 16 decodes": [(256, 1024)] + [(1, 512)] * 16,
}
_BYTES_PER_TOKEN = 2 * NUM_KV_HEADS * HEAD_DIM * torch.bfloat16.itemsize
_STREAMED_BYTES = 256 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each measurement")
    parser.add_argument("--shapes", nargs="*", default=[""], help="only shapes whose name contains one of these")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if library() is None:
        parser.error("there are no CPU kernels on this machine; install a C compiler")
    set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    bandwidth = _streaming_bandwidth(options.seconds)
    print(f"{options.threads} threads stream {bandwidth / 1e9:.1f} GB/s; bf16, best of {options.seconds:g} s")
    print(f"{'':38} {'ms':>9} {'torch ms':>9} {'floor ms':>9} {'GB/s':>7} {'GFLOP/s':>8}")
    results = {}
    for name, lengths in SHAPES.items():
        if any(part in name for part in options.shapes):
            results[name] = _measure(lengths, bandwidth, options.seconds)
            print(
                "{:38} {ms:9.3f} {torch_ms:9.3f} {floor_ms:9.3f} {gb_s:7.1f} {gflop_s:8.1f}".format(
                    name, **results[name]
                )
            )
    if options.out:
        machine = describe(torch.device("cpu")) | {"threads": options.threads, "stream_gb_s": bandwidth / 1e9}
        write_result(options.out, {"machine": machine, "results": results})


def _measure(lengths: list[tuple[int, int]], bandwidth: float, seconds: float) -> dict[str, Any]:
    inputs = _make_inputs(lengths)
    c_kernel, in_torch = CpuBackend(), CpuBackend(use_c_kernel=False)
    kernel_seconds = _best_seconds(lambda: c_kernel.forward(inputs), seconds)
    torch_seconds = _best_seconds(lambda: in_torch.forward(inputs), seconds)
    read = sum(seq_len for _, seq_len in lengths) * _BYTES_PER_TOKEN
    pairs = sum(query_len * (2 * seq_len - query_len + 1) // 2 for query_len, seq_len in lengths)  # query with key
    return {
        "ms": kernel_seconds * 1e3,
        "torch_ms": torch_seconds * 1e3,
        "floor_ms": read / bandwidth * 1e3,
        "gb_s": read / kernel_seconds / 1e9,
        "gflop_s": 4 * NUM_HEADS * HEAD_DIM * pairs / kernel_seconds / 1e9,
    }


def _make_inputs(lengths: list[tuple[int, int]]) -> AttentionInputs:
    counts = [-(-seq_len // BLOCK_SIZE) for _, seq_len in lengths]
    shuffled = torch.randperm(sum(counts), dtype=torch.int32)
    tables = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32)
    for table, blocks in zip(tables, torch.split(shuffled, counts), strict=True):
        table[: len(blocks)] = blocks
    shape = (sum(counts), BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    keys, values = (torch.randn(shape).bfloat16() for _ in range(2))
    query_lens = torch.tensor([0, *(query_len for query_len, _ in lengths)])
    bounds = query_lens.cumsum(0).int()
    metadata = AttentionMetadata(
        slot_mapping=torch.zeros(int(bounds[-1]), dtype=torch.int64),
        cu_seqlens_q=bounds,
        seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32),
        block_tables=tables,
        num_decodes=leading_decodes(query_len for query_len, _ in lengths),
        max_query_len=int(query_lens.max()),
        max_seq_len=max(seq_len for _, seq_len in lengths),
    )
    query = torch.randn(int(bounds[-1]), NUM_HEADS, HEAD_DIM).bfloat16()
    return AttentionInputs(query, keys, values, metadata, scale=1 / math.sqrt(HEAD_DIM))


def _streaming_bandwidth(seconds: float) -> float:
    """Return the bytes per second of a streaming read."""
    numbers = torch.ones(_STREAMED_BYTES // torch.float32.itemsize)
    return _STREAMED_BYTES / _best_seconds(numbers.sum, seconds)


def _best_seconds(run: Callable[[], object], seconds: float) -> float:
    best = math.inf
    end = perf_counter() + seconds
    for repeat in range(1_000_000):
        started = perf_counter()
        run()
        finished = perf_counter()
        best = min(best, finished - started)
        if finished > end and repeat >= 3:
            break
    return best


if __name__ == "__main__":
    main()
