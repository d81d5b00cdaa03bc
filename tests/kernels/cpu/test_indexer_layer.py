"""Sparse latent attention of a whole layer in C: it reads what the reference chooses, also of equal scores."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.nn import functional as F

from kernels.attention.indexer import topk_slots_torch
from kernels.attention.indexer_inputs import IndexerInputs
from kernels.attention_metadata import AttentionMetadata
from kernels.cpu import reference
from kernels.cpu.indexer import IndexerSizes
from kernels.cpu.latent import LatentSizes
from kernels.cpu.layer import LayerShape, PackedLayer
from kernels.cpu.library import library, set_num_threads
from kernels.cpu.linear import WeightKind
from kernels.cpu.scratch import Scratch
from kernels.cpu.step import CpuStep, mixer_half
from kernels.layer_ops.base import Rotation
from kernels.layer_ops.torch import rotate_heads

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

HIDDEN, HEADS, QUERY_RANK, RANK, NOPE, ROPE, VALUE = 40, 2, 28, 32, 20, 16, 24
INDEX_HEADS, INDEX_DIM, BLOCK_SIZE = 5, 24, 4
LENGTHS = (37, 6)  # of two sequences, whose last NEW tokens a step computes
NEW = (30, 3)


class Weights(NamedTuple):
    """Of the indexer, and of what gives the queries' latent."""

    first: torch.Tensor
    query_norm: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    heads: torch.Tensor
    key_norm: torch.Tensor
    key_bias: torch.Tensor


def random_weights(generator: torch.Generator) -> Weights:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    return Weights(
        random(QUERY_RANK + RANK + ROPE, HIDDEN),
        random(QUERY_RANK) + 1.0,
        random(INDEX_HEADS * INDEX_DIM, QUERY_RANK),
        random(INDEX_DIM, HIDDEN),
        random(INDEX_HEADS, HIDDEN),
        random(INDEX_DIM) + 1.0,
        random(INDEX_DIM),
    )


def packed_layer(weights: Weights, rope: torch.Tensor, top_k: int) -> PackedLayer:
    """Return a layer whose output is zero, because only its choice is of interest."""
    index = IndexerSizes(
        hidden_size=HIDDEN,
        query_rank=QUERY_RANK,
        num_heads=INDEX_HEADS,
        head_dim=INDEX_DIM,
        top_k=top_k,
        norm_eps=1e-6,
    )
    sizes = LatentSizes(
        num_heads=HEADS,
        query_rank=QUERY_RANK,
        rank=RANK,
        nope_dim=NOPE,
        rope_dim=ROPE,
        value_dim=VALUE,
        norm_eps=1e-6,
        index=index,
    )
    shape = LayerShape(
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
    layer = PackedLayer(shape, WeightKind.FLOAT32, torch.float32)
    layer.qkv.set_weight(weights.first)
    layer.set_rope(rope)
    assert layer.latent is not None
    layer.latent.set_query_norm(weights.query_norm)
    layer.latent.set_latent_norm(torch.ones(RANK))
    indexer = layer.latent.indexer
    assert indexer is not None
    indexer.query.set_weight(weights.query)
    indexer.key.set_weight(weights.key)
    indexer.head_weights.set_weight(weights.heads)
    indexer.set_key_norm(weights.key_norm)
    indexer.set_key_bias(weights.key_bias)
    return layer


def step_metadata() -> tuple[AttentionMetadata, torch.Tensor]:
    """Return a step of two sequences in blocks that are out of order, and the positions of its tokens."""
    tables = torch.tensor([[4, 0, 12, 2, 9, 1, 7, 3, 11, 5], [6, 10, *[-1] * 8]], dtype=torch.int32)
    positions = [torch.arange(length - new, length) for length, new in zip(LENGTHS, NEW, strict=True)]
    slots = [tables[i, own // BLOCK_SIZE].long() * BLOCK_SIZE + own % BLOCK_SIZE for i, own in enumerate(positions)]
    metadata = AttentionMetadata(
        slot_mapping=torch.cat(slots),
        cu_seqlens_q=torch.tensor([0, NEW[0], sum(NEW)], dtype=torch.int32),
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        block_tables=tables,
        num_decodes=0,
        max_query_len=max(NEW),
        max_seq_len=max(LENGTHS),
    )
    return metadata, torch.cat(positions)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("are_equal", [False, True])
@pytest.mark.parametrize("top_k", [1, 5, 36])
def test_the_choice_is_that_of_the_reference(top_k: int, are_equal: bool, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(top_k)
    weights = random_weights(generator)
    if are_equal:  # scores of many keys are zero
        weights = weights._replace(key=torch.zeros_like(weights.key))
    metadata, positions = step_metadata()
    rope, hidden = (torch.rand(size, generator=generator) for size in ((64, 2, ROPE // 2), (sum(NEW), HIDDEN)))
    cache = torch.randn(13, BLOCK_SIZE, INDEX_DIM, generator=generator)  # of tokens of earlier steps, too
    if are_equal:
        cache[:] = weights.key_bias

    norm = torch.ones(HIDDEN)
    inputs, rotation = reference.rms_norm(hidden, norm, 1e-5), Rotation(rope, positions, torch.float32)
    query_latent = reference.rms_norm(inputs @ weights.first[:QUERY_RANK].t(), weights.query_norm, 1e-6)

    def rotate(heads: torch.Tensor) -> torch.Tensor:
        return torch.cat((rotate_heads(heads[..., :ROPE], rotation), heads[..., ROPE:]), dim=-1)

    keys = F.layer_norm(inputs @ weights.key.t(), (INDEX_DIM,), weights.key_norm, weights.key_bias, 1e-6)
    expected_cache = cache.clone()
    expected_cache.view(-1, INDEX_DIM)[metadata.slot_mapping] = rotate(keys.unsqueeze(1)).squeeze(1)
    queries = rotate((query_latent @ weights.query.t()).unflatten(1, (INDEX_HEADS, -1)))
    head_weights = inputs @ weights.heads.t() * INDEX_HEADS**-0.5
    expected = topk_slots_torch(IndexerInputs(queries, head_weights, expected_cache, metadata, INDEX_DIM**-0.5, top_k))

    layer = packed_layer(weights, rope, top_k)
    layer.set_norm("input_norm", norm)
    scratch = Scratch(
        WeightKind.FLOAT32,
        width=256,
        outputs=256,
        attention_width=HEADS * (RANK + ROPE),
        cache_dtype=torch.float32,
        mixed_width=QUERY_RANK,
    )
    set_num_threads(num_threads)
    step = CpuStep(hidden, positions, metadata, BLOCK_SIZE, scratch, top_k=top_k)
    mixer_half(layer, step, [[torch.zeros(13, BLOCK_SIZE, RANK + ROPE)], [cache]])
    set_num_threads(1)
    torch.testing.assert_close(cache, expected_cache, atol=1e-4, rtol=1e-4)
    chosen, num_chosen = step.chosen
    for row, wanted in enumerate(expected.tolist()):
        assert chosen[row, : num_chosen[row]].tolist() == [slot for slot in wanted if slot >= 0], row
