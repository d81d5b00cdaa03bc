"""Latent attention, dense and sparse, against float64 references, and its times beside those of reading the latents.

Sparse attention has two halves: an indexer's choice of tokens, and attention to what is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.gpu.inputs.attention_cases import ODD_BATCHES, Case, serving_cases
from benchmarks.gpu.inputs.paged_batch import HeadShape, Lengths, chunked_reference, make_inputs, worst_error
from benchmarks.gpu.run.part_run import PartRun
from benchmarks.gpu.timing.floors import Work
from benchmarks.gpu.timing.graphs import captured
from benchmarks.machine import median_seconds
from kernels.attention.base import AttentionBackend, AttentionInputs
from kernels.attention.indexer import topk_slots, topk_slots_torch
from kernels.attention.indexer_inputs import IndexerInputs
from kernels.attention.select import select_backend
from kernels.attention.sparse import sparse_attention

__all__ = ["run"]

MOST_OTHERS = 0.001  # of the tokens that are chosen: rounding exchanges a few whose scores are nearly equal


def run(part: PartRun) -> None:
    """Check bfloat16 and float32, then record the times of decodes in bfloat16."""
    backend = select_backend(part.device, torch.bfloat16, options=frozenset({"latent", "sparse"}))
    part.record("backend", backend.name)
    cases = [*serving_cases(part.sizes.context), *ODD_BATCHES]
    for index, case in enumerate(cases):
        _check_dense(part, backend, case, torch.bfloat16, index)
    for index, case in enumerate(ODD_BATCHES):
        _check_dense(part, backend, case, torch.float32, index)
    short = part.sizes.latent.top_k
    decodes = [(1, 3 * short), (1, short), (1, 2 * short + 5), (1, 1)]
    for lengths in (decodes, [(7, 2 * short), (1, short + 3)]):
        for dtype in (torch.bfloat16, torch.float32):
            _check_sparse(part, backend, lengths, dtype)
    lines: list[str] = []
    for num_seqs, context in part.sizes.timed_attention:
        lines += _measure(part, backend, num_seqs, context)
        part.record("summary", lines)


def _inputs(
    part: PartRun, backend: AttentionBackend, lengths: Lengths, dtype: torch.dtype, seed: int = 0
) -> AttentionInputs:
    """Return a batch whose values are the beginnings of its keys."""
    sizes = part.sizes.latent
    shape = HeadShape(sizes.num_heads, 1, sizes.rank + sizes.rope_dim, backend.default_block_size, dtype)
    inputs = make_inputs(lengths, shape, part.device, seed=seed)
    return replace(inputs, value_cache=inputs.key_cache[..., : sizes.rank])


def _index_inputs(part: PartRun, inputs: AttentionInputs, seed: int = 0) -> IndexerInputs:
    """Return an indexer's batch for the same sequences."""
    sizes, generator = part.sizes.latent, torch.Generator(part.device).manual_seed(seed)
    num_tokens, dtype = len(inputs.query), inputs.query.dtype

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=part.device)

    return IndexerInputs(
        query=random(num_tokens, sizes.index_heads, sizes.index_dim).to(dtype),
        weights=random(num_tokens, sizes.index_heads),
        key_cache=random(*inputs.key_cache.shape[:2], sizes.index_dim).to(dtype),
        metadata=inputs.metadata,
        scale=sizes.index_dim**-0.5,
        top_k=sizes.top_k,
    )


# --- right answers ---------------------------------------------------------------------------------------------------


def _check_dense(part: PartRun, backend: AttentionBackend, case: Case, dtype: torch.dtype, seed: int) -> None:
    inputs = _inputs(part, backend, case.lengths, dtype, seed)
    _judge(part, f"{case.name}, {dtype}", worst_error(backend.forward(inputs), chunked_reference(inputs)))


def _check_sparse(part: PartRun, backend: AttentionBackend, lengths: Lengths, dtype: torch.dtype) -> None:
    """Compare the choice, and attention to what the reference chooses."""
    inputs = _inputs(part, backend, lengths, dtype)
    index = _index_inputs(part, inputs)
    expected, chosen = topk_slots_torch(index), topk_slots(index)
    others = _share_of_others(chosen, expected, inputs.key_cache.shape[:2].numel())
    name = f"{len(lengths)} sequences, {len(inputs.query)} tokens, {dtype}"
    part.record(f"other tokens chosen, {name}", others)
    if others > MOST_OTHERS:
        part.fault(f"{name}: {others:.2%} of the chosen tokens are others than those of the reference")
    inputs = replace(inputs, topk_slots=expected)
    keys = inputs.key_cache.double()
    exact = replace(
        inputs, query=inputs.query.double(), key_cache=keys, value_cache=keys[..., : part.sizes.latent.rank]
    )
    _judge(part, f"sparse, {name}", worst_error(backend.forward(inputs), sparse_attention(exact).to(dtype)))


def _share_of_others(chosen: torch.Tensor, expected: torch.Tensor, num_slots: int) -> float:
    """Return the share of the expected slots that were not chosen."""
    marks = torch.zeros(2, len(chosen), num_slots + 1, dtype=torch.bool, device=chosen.device)  # the last is for -1
    for mark, slots in zip(marks, (chosen, expected), strict=True):
        mark.scatter_(1, slots.long().remainder(num_slots + 1), value=True)
    missing = (marks[1] & ~marks[0])[:, :-1].sum()
    return float(missing / marks[1][:, :-1].sum())


def _judge(part: PartRun, name: str, error: float) -> None:
    part.record(f"error, {name}", min(error, 1e9))
    if not error <= 1.0:
        part.fault(f"{name}: {error:.3g} x tolerance")


# --- times -----------------------------------------------------------------------------------------------------------


def _measure(part: PartRun, backend: AttentionBackend, num_seqs: int, context: int) -> list[str]:
    """Record the times of dense decodes, of the choice, and of sparse decodes; return lines for the summary."""
    sizes = part.sizes.latent
    inputs = _inputs(part, backend, [(1, context)] * num_seqs, torch.bfloat16)
    index = _index_inputs(part, inputs)
    sparse = replace(inputs, topk_slots=topk_slots(index))
    latent, read = 2 * (sizes.rank + sizes.rope_dim), min(sizes.top_k, context)
    flop = 2 * sizes.num_heads * (2 * sizes.rank + sizes.rope_dim)  # of a token that is attended to
    of_index = Work(
        2 * sizes.index_dim * context * num_seqs, 2 * sizes.index_heads * sizes.index_dim * context * num_seqs
    )
    steps: dict[str, tuple[Callable[[], object], Work]] = {
        "dense": (lambda: backend.forward(inputs), Work(latent * context * num_seqs, flop * context * num_seqs)),
        "choice": (lambda: topk_slots(index), of_index),
        "sparse": (lambda: backend.forward(sparse), Work(latent * read * num_seqs, flop * read * num_seqs)),
    }
    lines = []
    for name, (run_once, work) in steps.items():
        run_once()  # compiles
        seconds = median_seconds(captured(run_once, part.device), part.device)
        figures = work.figures(seconds, part.limits)
        part.record(f"{name}, {num_seqs} x {context}", figures)
        lines.append(
            f"{name:8} {num_seqs:4} x {context:6} {1e3 * figures['milliseconds']:8.1f} us, "
            f"floor {1e3 * figures['floor_milliseconds']:8.1f}"
        )
    return lines
