"""Which variants of the kernels compile_for_gpu.py compiles: shapes that models have, in every dtype, on every GPU.

All of them would take most of an hour, so `make test-all` compiles a part in which any two values of different
dimensions occur together, a GPU's capability being one dimension, and CI one in which each value occurs. ptxas may
spill a register of a combination that is not in these parts: after a change of a kernel or of Triton, compile ``all``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import torch
from torch import nn

from engine.models.decoder.latent_attention import LatentNorm
from engine.worker.warm_up_steps import one_sequence
from kernels.attention.base import AttentionInputs, StepLimits
from kernels.attention.indexer_inputs import IndexerInputs
from kernels.attention.triton.backend import TritonBackend
from kernels.attention.triton.indexer import topk_slots_triton
from kernels.attention.window import Chunk, Window
from kernels.attention_metadata import AttentionMetadata
from kernels.cache.fp8 import FP8
from kernels.cache.triton.store_kvcache import store_kvcache_triton
from kernels.coded_weight import Activations, CodedWeight, CodeFormat
from kernels.experts.coded_stack import CodedStack
from kernels.experts.triton.experts import experts_triton
from kernels.layer_ops.base import LatentCache, Rotation
from kernels.layer_ops.triton.ops import TritonOps
from kernels.linear.coded_decode import scratch_of
from kernels.linear.coded_triton import CodedTritonLinear
from kernels.linear.fp8_triton import Fp8Linear
from kernels.linear.triton import linear_triton
from tests.kernels.coded_matrices import FORMATS, random_matrix
from tests.kernels.layer_ops_launches import MODELS, run_layer_ops
from tests.kernels.recurrent_launches import RECURRENT_MODELS, run_recurrent

__all__ = [
    "VARIANTS",
    "covering",
    "each_value",
    "every",
    "run_attention",
    "run_coded",
    "run_coded_experts",
    "run_fp8",
    "run_sparse",
]

CPU = torch.device("cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Launch = Callable[..., None]
Row = dict[str, Any]


@dataclass(frozen=True)
class _Kernels:
    """What to launch with each combination of the dimensions' values."""

    launch: Launch
    dimensions: dict[str, tuple[Any, ...]]


def run_attention(
    *,
    dtype: torch.dtype,
    head_dim: int,
    group_size: int,
    window: Window | None,
    options: frozenset[str] = frozenset(),
    block_size: int = 16,
    num_kv_heads: int = 2,
    max_query_len: int = 2048,
    max_seq_len: int = 40960,
    is_fp8: bool = False,
) -> None:
    """Launch what a warm-up launches in one layer: attention, and the cache write that other layer operations lack."""
    is_fp8 = is_fp8 and not (dtype == torch.float32 and head_dim > 128)  # which spill registers
    backend, num_heads = TritonBackend(), group_size * num_kv_heads
    limits = StepLimits(dtype, CPU, frozenset([window]), max_query_len, max_seq_len)
    cache = torch.zeros(1, block_size, num_kv_heads, head_dim, dtype=FP8 if is_fp8 else dtype)
    softcap = 50.0 if "softcap" in options else None
    sinks = torch.zeros(num_heads) if "sinks" in options else None
    for query_len, seq_len in backend.warm_up_batches(limits):
        metadata = one_sequence(query_len, seq_len, block_size=block_size, device=CPU).metadata
        query = torch.zeros(query_len, num_heads, head_dim, dtype=dtype)
        backend.forward(AttentionInputs(query, cache, cache, metadata, head_dim**-0.5, window, softcap, sinks))
        key = query[:, :num_kv_heads]
        store_kvcache_triton(key, key, cache, cache, metadata.slot_mapping)


def run_latents(*, dtype: torch.dtype, shape: tuple[int, int, int], block_size: int) -> None:
    """Launch what a warm-up launches in a layer with latents: attention, and the completion of queries."""
    rank, rope_dim, num_heads = shape
    backend, width = TritonBackend(), rank + rope_dim
    cache = torch.zeros(1, block_size, width, dtype=dtype)
    norm = LatentNorm(rank, 1e-6).to(dtype)
    limits = StepLimits(dtype, CPU, frozenset([None]), 2048, 40960)
    for query_len, seq_len in backend.warm_up_batches(limits):
        metadata = one_sequence(query_len, seq_len, block_size=block_size, device=CPU).metadata
        query = torch.zeros(query_len, num_heads, width, dtype=dtype)
        keys = cache.unsqueeze(2)
        backend.forward(AttentionInputs(query, keys, keys[..., :rank], metadata, width**-0.5))
        positions = torch.zeros(query_len, dtype=torch.int64)
        for rotation in (None, Rotation(torch.zeros(1, 2, rope_dim // 2), positions, dtype)):
            TritonOps().rotate_and_store_latents(
                query, query[..., rank:], query[:, 0], norm, rotation, LatentCache(cache, metadata.slot_mapping)
            )


def run_expanded(*, dtype: torch.dtype, shape: tuple[int, int, int], block_size: int, num_heads: int = 3) -> None:
    """Launch what a prefill launches that expands latents."""
    nope_dim, rope_dim, value_dim = shape
    metadata = replace(one_sequence(2, 2, block_size=block_size, device=CPU).metadata, num_decodes=0)
    cache = torch.zeros(1, block_size, num_heads, nope_dim + value_dim, dtype=dtype)
    inputs = AttentionInputs(
        torch.zeros(2, num_heads, nope_dim + rope_dim, dtype=dtype),
        cache[..., :nope_dim],
        cache[..., nope_dim:],
        metadata,
        0.1,
        rope_cache=torch.zeros(1, block_size, 1, 512 + rope_dim, dtype=dtype)[..., 512:],
    )
    TritonBackend().forward(inputs)


def _run_linear(*, dtype: torch.dtype, num_rows: int, num_inputs: int, num_outputs: int, has_bias: bool) -> None:
    weight = torch.zeros(num_outputs, num_inputs, dtype=dtype)
    bias = weight[:, 0].contiguous() if has_bias else None
    linear_triton(torch.zeros(num_rows, num_inputs, dtype=dtype), weight, bias)


def run_coded(*, format: str, dtype: torch.dtype, shape: tuple[int, int], has_bias: bool) -> None:
    """Launch what a linear layer on codes of [outputs, inputs] launches for any number of rows."""
    layer = CodedTritonLinear(CodedWeight((random_matrix(FORMATS[format], *shape),)), shape[0], CPU)
    if has_bias:
        layer.bias = nn.Parameter(torch.zeros(shape[0], dtype=dtype), requires_grad=False)
    layer.scratch = scratch_of([shape], dtype, CPU)
    layer.compile_kernels(dtype)
    if not has_bias and layer.input_order is None:
        layer.look_up(torch.zeros(1, dtype=torch.int64), dtype)


def run_fp8(*, activations: Activations, dtype: torch.dtype, shape: tuple[int, int], option: str) -> None:
    """Launch what a linear layer of FP8 weights and activations launches for any number of rows."""
    granules = 4 if activations == "groups" else 2**19
    form = CodeFormat(bits=8, granules_per_outer=granules, outer_type="float32", floats="e4m3", activations=activations)
    matrix = random_matrix(form, *shape)
    if option == "one scale" and activations == "tokens":
        matrix = replace(matrix, activation_scales=torch.ones(shape[0]))
    layer = Fp8Linear(CodedWeight((matrix,)), shape[0], CPU, batch_invariant=option == "batch invariant")
    if option == "bias":
        layer.bias = nn.Parameter(torch.zeros(shape[0], dtype=dtype), requires_grad=False)
    layer.compile_kernels(dtype)


def run_coded_experts(*, format: str, dtype: torch.dtype, shape: tuple[int, int], option: str) -> None:
    """Launch what experts on codes of [inputs, features] launch for few tokens and for many."""
    num_experts, (hidden, inner) = 2, shape
    has_gate = option != "no gate"
    stacks = []
    for size in ((2 * inner if has_gate else inner, hidden), (hidden, inner)):
        section = CodedStack.section(CodedWeight((random_matrix(FORMATS[format], *size),)), size[0], CPU)
        stacks.append(CodedStack(section, num_experts))
    for num_tokens in (1, 20):
        zeros = torch.zeros(num_tokens, hidden, dtype=dtype), torch.zeros(num_tokens, num_experts, dtype=dtype)
        options: dict[str, Any] = {"gated": has_gate, "scales_inputs": option == "scaled inputs"}
        experts_triton(*zeros, *stacks, 2, normalize=True, **options)


def run_sparse(
    metadata: AttentionMetadata, *, dtype: torch.dtype, num_heads: int, num_index_heads: int, block_size: int
) -> None:
    """Launch the choice of tokens and the attention to them, of latents of the published sizes."""
    count = metadata.slot_mapping.shape[0]
    query, keys = torch.zeros(count, num_index_heads, 128, dtype=dtype), torch.zeros(1, block_size, 128, dtype=dtype)
    slots = topk_slots_triton(IndexerInputs(query, torch.zeros(count, num_index_heads), keys, metadata, 0.1, top_k=64))
    query, cache = torch.zeros(count, num_heads, 576, dtype=dtype), torch.zeros(1, block_size, 1, 576, dtype=dtype)
    TritonBackend().forward(AttentionInputs(query, cache, cache[..., :512], metadata, 0.1, topk_slots=slots))


def _run_sparse(*, block_size: int, **shape: Any) -> None:
    metadata = one_sequence(2, 100, block_size=block_size, device=CPU).metadata
    run_sparse(metadata, block_size=block_size, **shape)


def _run_layers(*, dtype: torch.dtype, model: str) -> None:
    run_layer_ops(replace(MODELS[model], dtype=dtype))


def _run_recurrent(*, dtype: torch.dtype, model: str) -> None:
    run_recurrent(RECURRENT_MODELS[model], dtype)


_LATENTS = (  # rank, elements that are rotated, query heads
    (512, 64, 128),  # DeepSeek V3
    (512, 64, 20),  # GLM-4.7-Flash
    (512, 64, 2),  # Youtu on eight GPUs
    (256, 32, 40),  # MiniCPM3
    (256, 32, 5),  # on eight GPUs
    (256, 64, 32),  # Mistral 4
)
_EXPANDED = (  # elements of a key of its own, those that heads share, and those of a value
    (128, 64, 128),  # DeepSeek V3, Kimi K2, Youtu
    (192, 64, 256),  # GLM-4.7-Flash
    (64, 32, 64),  # MiniCPM3
    (64, 64, 128),  # Mistral 4
)
VARIANTS = {
    "attention": _Kernels(
        run_attention,
        {
            "head_dim": (64, 80, 128, 256, 512),
            "group_size": (1, 4, 8, 16),
            "options": (frozenset(), frozenset({"softcap"}), frozenset({"sinks"}), frozenset({"softcap", "sinks"})),
            "dtype": DTYPES,
            "is_fp8": (False, True),
            "window": (None, 600, Chunk(600)),
            "block_size": (16, 256),
        },
    ),
    "sparse": _Kernels(
        _run_sparse,
        {"dtype": DTYPES, "num_heads": (8, 64, 128), "num_index_heads": (32, 64), "block_size": (16, 256)},
    ),
    "latents": _Kernels(
        run_latents,
        {"shape": _LATENTS, "dtype": DTYPES, "block_size": (16, 256)},
    ),
    "expanded": _Kernels(
        run_expanded,
        {"shape": _EXPANDED, "dtype": DTYPES, "block_size": (16, 256)},
    ),
    "layers": _Kernels(_run_layers, {"model": tuple(MODELS), "dtype": DTYPES}),
    "recurrent": _Kernels(_run_recurrent, {"model": tuple(RECURRENT_MODELS), "dtype": DTYPES}),
    "linear": _Kernels(
        _run_linear,
        {
            "dtype": DTYPES,
            "num_rows": (70, 600),
            "num_inputs": (128, 100),
            "num_outputs": (128, 33),
            "has_bias": (False, True),
        },
    ),
    "coded": _Kernels(
        run_coded,
        {
            "format": tuple(FORMATS),
            "dtype": DTYPES,
            "shape": ((128, 1024), (33, 512), (128, 100)),
            "has_bias": (False, True),
        },
    ),
    "fp8": _Kernels(
        run_fp8,
        {
            "activations": ("groups", "tokens"),
            "dtype": DTYPES,
            "shape": ((512, 1024), (33, 512), (128, 112)),
            "option": ("bias", "one scale", "batch invariant"),
        },
    ),
    "coded_experts": _Kernels(
        run_coded_experts,
        {
            "format": tuple(name for name, form in FORMATS.items() if not form.has_input_order),
            "dtype": DTYPES,
            "shape": ((512, 256), (384, 96), (160, 48)),
            "option": ("gated", "no gate", "scaled inputs"),
        },
    ),
}


def every(dimensions: dict[str, tuple[Any, ...]]) -> list[Row]:
    """Return all combinations of the dimensions' values."""
    return [dict(zip(dimensions, values, strict=True)) for values in product(*dimensions.values())]


def covering(dimensions: dict[str, tuple[Any, ...]]) -> list[Row]:
    """Return combinations in which any two values of different dimensions occur together, chosen greedily."""
    rows = every(dimensions)
    pairs = [set(combinations(row.items(), 2)) for row in rows]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(pairs[index] & missing))
        chosen.append(rows[best])
        missing -= pairs[best]
    return chosen


def each_value(dimensions: dict[str, tuple[Any, ...]]) -> list[Row]:
    """Return as many combinations as the longest dimension has values, in which each value of each one occurs."""
    count = max(map(len, dimensions.values()))
    return [{name: values[index % len(values)] for name, values in dimensions.items()} for index in range(count)]
