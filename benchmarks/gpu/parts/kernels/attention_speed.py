"""One layer's decode attention, beside the time to read its keys and values at the copy bandwidth.

The batches rotate among more keys and values than a cache holds, and are replayed from a CUDA graph, so that neither
the cache nor the host's launches count. Eager calls are timed beside it.
"""

from __future__ import annotations

from itertools import product

from benchmarks.gpu.backends import cache_kinds, usable_backends
from benchmarks.gpu.inputs.paged_batch import HeadShape, make_inputs
from benchmarks.gpu.run.part_run import PartRun
from benchmarks.gpu.timing.floors import Work
from benchmarks.gpu.timing.graphs import captured
from benchmarks.machine import median_seconds
from kernels.attention.base import AttentionBackend

__all__ = ["run"]

ROTATED_BYTES = 2**29  # several times the 60 MB of an H200's second-level cache
MAX_ROTATED = 32


def run(part: PartRun) -> None:
    """Record the time of each backend, shape and batch."""
    lines = []
    for backend in usable_backends(part):
        for num_heads, num_kv_heads, head_dim in part.sizes.attention:
            for is_fp8, (num_seqs, context) in product(cache_kinds(backend), part.sizes.timed_attention):
                shape = HeadShape(num_heads, num_kv_heads, head_dim, backend.default_block_size, is_fp8=is_fp8)
                name = f"{backend.name}{', fp8' * is_fp8}, {num_heads}/{num_kv_heads} heads, {num_seqs} x {context}"
                figures = _measure(part, backend, shape, num_seqs, context)
                part.record(name, figures)
                lines.append(f"{name:40} {1e3 * figures['milliseconds']:8.1f} us, {figures['share_of_limit']:4.0%}")
                part.record("summary", lines)


def _measure(
    part: PartRun, backend: AttentionBackend, shape: HeadShape, num_seqs: int, context: int
) -> dict[str, float]:
    kv_bytes = num_seqs * context * shape.kv_bytes_per_token
    copies = min(MAX_ROTATED, -(-ROTATED_BYTES // kv_bytes)) if part.on_gpu else 2
    batches = [make_inputs([(1, context)] * num_seqs, shape, part.device, seed=seed) for seed in range(copies)]

    def run_all() -> None:
        for batch in batches:
            backend.forward(batch)

    eager = median_seconds(run_all, part.device) / copies
    seconds = median_seconds(captured(run_all, part.device), part.device) / copies
    work = Work(num_bytes=kv_bytes, flop=4 * num_seqs * context * shape.num_heads * shape.head_dim)
    return work.figures(seconds, part.limits) | {"eager_milliseconds": 1e3 * eager}
