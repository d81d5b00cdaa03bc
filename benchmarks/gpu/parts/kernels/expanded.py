"""Prefills of latent attention, absorbed and expanded: that both compute the same, and what each takes."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.gpu.inputs.paged_batch import HeadShape, make_inputs, worst_error
from benchmarks.gpu.run.part_run import PartRun
from benchmarks.gpu.timing.floors import Work
from benchmarks.gpu.timing.graphs import captured
from benchmarks.machine import median_seconds
from engine.models.config.shapes.latent import LatentShape
from engine.models.decoder.expanded_latents import attend_expanded, parts_of
from engine.models.decoder.latent_attention import HeadMatrices
from kernels.attention.base import AttentionBackend
from kernels.attention.select import select_backend

__all__ = ["run"]


def run(part: PartRun) -> None:
    """Compare both in float32 and bfloat16, then record the times of long prefills in bfloat16."""
    backend = select_backend(part.device, torch.bfloat16, options=frozenset({"latent"}))
    part.record("backend", backend.name)
    if not backend.expands_latents:
        return
    query_len, seq_len = part.sizes.checked_expansion
    for dtype in (torch.float32, torch.bfloat16):
        prefill = _Prefill(part, backend, part.sizes.latent.num_heads, query_len, seq_len, dtype)
        error = worst_error(prefill.expand(), prefill.absorb())
        part.record(f"error, {dtype}", min(error, 1e9))
        # Both round products of bfloat16, and at other places.
        if not error <= (1.0 if dtype == torch.float32 else 3.0):
            part.fault(f"expanded latents, {dtype}: {error:.3g} x tolerance from absorbed ones")
    lines: list[str] = []
    for num_heads, query_len, seq_len in part.sizes.timed_expansions:
        lines += _measure(part, backend, num_heads, query_len, seq_len)
        part.record("summary", lines)


class _Prefill:
    """One layer's chunk of a prompt, from its queries without positions to the values of its heads."""

    def __init__(
        self,
        part: PartRun,
        backend: AttentionBackend,
        num_heads: int,
        query_len: int,
        seq_len: int,
        dtype: torch.dtype,
    ) -> None:
        sizes, self.backend = part.sizes.latent, backend
        self.shape = LatentShape(
            query_rank=None,
            rank=sizes.rank,
            nope_dim=sizes.nope_dim,
            rope_dim=sizes.rope_dim,
            value_dim=sizes.value_dim,
        )
        head = HeadShape(num_heads, 1, sizes.rank + sizes.rope_dim, backend.default_block_size, dtype)
        inputs = make_inputs([(query_len, seq_len)], head, part.device)
        metadata = replace(inputs.metadata, host_lens=((query_len, seq_len),))
        scale = (sizes.nope_dim + sizes.rope_dim) ** -0.5
        self.layer = replace(inputs, value_cache=inputs.key_cache[..., : sizes.rank], metadata=metadata, scale=scale)
        generator = torch.Generator(part.device).manual_seed(1)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=part.device).to(dtype)

        self.matrices, rank = HeadMatrices(num_heads, self.shape), sizes.rank
        weight = random(*self.matrices.weight.shape) * rank**-0.5
        self.matrices.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.nope = random(query_len, num_heads, sizes.nope_dim)
        (self.part,) = parts_of(metadata, self.shape, num_heads, inputs.key_cache.squeeze(2))
        assert self.part.block_ids is not None, f"{query_len} queries are not expanded"

    def absorb(self) -> torch.Tensor:
        """Return the values as attention to latents computes them."""
        query = self.layer.query.clone()
        self.matrices.to_latents(self.nope, query[..., : self.shape.rank])
        output = self._new_output()
        self.matrices.to_values(self.backend.forward(replace(self.layer, query=query)), output)
        return output

    def expand(self) -> torch.Tensor:
        """Return the values as attention to keys and values computes them."""
        query, output = self.layer.query.clone(), self._new_output()
        query[..., self.shape.rank - self.shape.nope_dim : self.shape.rank] = self.nope
        layer, weight = replace(self.layer, query=query), self.matrices.weight
        attend_expanded(self.part, layer, weight, self.shape, self.backend, output)
        return output

    def _new_output(self) -> torch.Tensor:
        return self.layer.query.new_empty(*self.layer.query.shape[:2], self.shape.value_dim)


def _measure(part: PartRun, backend: AttentionBackend, num_heads: int, query_len: int, seq_len: int) -> list[str]:
    """Record the times of one prefill; return lines for the summary."""
    prefill = _Prefill(part, backend, num_heads, query_len, seq_len, torch.bfloat16)
    shape, pairs = prefill.shape, query_len * seq_len - query_len * (query_len - 1) / 2
    matrices = shape.rank * (shape.nope_dim + shape.value_dim)
    products = {
        "absorbed": query_len * matrices + pairs * (2 * shape.rank + shape.rope_dim),
        "expanded": seq_len * matrices + pairs * (shape.nope_dim + shape.rope_dim + shape.value_dim),
    }
    lines = []
    for name, run_once in (("absorbed", prefill.absorb), ("expanded", prefill.expand)):
        run_once()  # compiles
        seconds = median_seconds(captured(run_once, part.device), part.device)
        figures = Work(0, 2 * num_heads * products[name]).figures(seconds, part.limits)
        part.record(f"{name}, {num_heads} heads, {query_len} of {seq_len}", figures)
        lines.append(
            f"{name} {num_heads:4} heads {query_len:6} of {seq_len:6} {figures['milliseconds']:8.2f} ms, "
            f"floor {figures['floor_milliseconds']:8.2f}"
        )
    return lines
