"""Latent attention of a whole layer in C against the references of its parts, with sizes that fill no vector."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import reference as attention_reference
from kernels.attention.base import AttentionInputs
from kernels.attention_metadata import AttentionMetadata
from kernels.cpu import reference
from kernels.cpu.latent import LatentSizes
from kernels.cpu.layer import LayerShape, PackedLayer
from kernels.cpu.library import library, set_num_threads
from kernels.cpu.linear import WeightKind
from kernels.cpu.scratch import Scratch
from kernels.cpu.step import CpuStep, mixer_half
from kernels.layer_ops import reference as ops_reference
from kernels.layer_ops.base import LatentCache, Rotation
from tests.kernels.layer_ops.tensors import TestNorm

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

HIDDEN, HEADS, RANK, NOPE, ROPE, VALUE, BLOCK_SIZE, LENGTH = 40, 3, 32, 20, 16, 24, 4, 12
TOLERANCE = 1e-4


def layer_shape(query_rank: int | None) -> LayerShape:
    sizes = LatentSizes(
        num_heads=HEADS,
        query_rank=query_rank,
        rank=RANK,
        nope_dim=NOPE,
        rope_dim=ROPE,
        value_dim=VALUE,
        norm_eps=1e-6,
    )
    return LayerShape(
        hidden_size=HIDDEN,
        num_heads=HEADS,
        num_kv_heads=1,
        head_dim=RANK + ROPE,
        intermediate_size=0,
        window=None,
        norm_eps=1e-5,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        scale=0.3,
        latent=sizes,
    )


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("query_rank", [None, 28])
def test_a_layer_equals_its_references(query_rank: int | None, num_threads: int) -> None:
    """A prompt in blocks that are out of order, with factors of queries."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    width = query_rank or HEADS * (NOPE + ROPE)
    first, matrices = random(width + RANK + ROPE, HIDDEN), random(HEADS * (NOPE + VALUE), RANK)
    second, output = random(HEADS * (NOPE + ROPE), width), random(HIDDEN, HEADS * VALUE)
    norms = [random(size) + 1.0 for size in (HIDDEN, width, RANK)]
    rope, growth = torch.rand(LENGTH, 2, ROPE // 2, generator=generator), torch.linspace(1.0, 2.0, LENGTH)
    layer = PackedLayer(layer_shape(query_rank), WeightKind.FLOAT32, torch.float32)
    assert layer.latent is not None
    layer.qkv.set_weight(first)
    layer.output.set_weight(output)
    layer.set_norm("input_norm", norms[0])
    layer.set_rope(rope)
    layer.latent.set_growth(growth)
    layer.latent.set_latent_norm(norms[2])
    layer.latent.set_head_matrices(matrices)
    if layer.latent.query is not None:
        layer.latent.query.set_weight(second)
        layer.latent.set_query_norm(norms[1])

    table = torch.tensor([[4, 0, 2]], dtype=torch.int32)
    positions = torch.arange(LENGTH)
    metadata = AttentionMetadata(
        slot_mapping=table[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        cu_seqlens_q=torch.tensor([0, LENGTH], dtype=torch.int32),
        seq_lens=torch.tensor([LENGTH], dtype=torch.int32),
        block_tables=table,
        num_decodes=0,
        max_query_len=LENGTH,
        max_seq_len=LENGTH,
    )
    hidden = torch.randn(LENGTH, HIDDEN, generator=generator)
    cache, expected_cache = torch.zeros(5, BLOCK_SIZE, RANK + ROPE), torch.zeros(5, BLOCK_SIZE, RANK + ROPE)

    query, latent = (reference.rms_norm(hidden, norms[0], 1e-5) @ first.t()).split((width, RANK + ROPE), dim=1)
    if query_rank is not None:
        query = reference.rms_norm(query, norms[1], 1e-6) @ second.t()
    by_head = query.view(LENGTH, HEADS, -1) * growth[:, None, None]
    keys, values = matrices.view(HEADS, -1, RANK).split((NOPE, VALUE), dim=1)
    queries = torch.cat((torch.einsum("thn,hnr->thr", by_head[..., :NOPE], keys), by_head[..., NOPE:]), dim=2)
    ops_reference.rotate_and_store_latents(
        queries,
        by_head[..., NOPE:],
        latent,
        TestNorm(norms[2], 1e-6),
        Rotation(rope, positions, torch.float32),
        LatentCache(expected_cache, metadata.slot_mapping),
    )
    cached = expected_cache.unsqueeze(2)
    attended = attention_reference.attention(AttentionInputs(queries, cached, cached[..., :RANK], metadata, 0.3))
    expected = hidden + torch.einsum("thr,hvr->thv", attended, values).flatten(1) @ output.t()

    scratch = Scratch(
        WeightKind.FLOAT32, width=256, outputs=256, attention_width=HEADS * (RANK + ROPE), cache_dtype=torch.float32,
        mixed_width=width,
    )  # fmt: skip
    set_num_threads(num_threads)
    mixer_half(layer, CpuStep(hidden, positions, metadata, BLOCK_SIZE, scratch), [[cache]])
    set_num_threads(1)
    torch.testing.assert_close(cache, expected_cache, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(hidden, expected, atol=TOLERANCE, rtol=TOLERANCE)
