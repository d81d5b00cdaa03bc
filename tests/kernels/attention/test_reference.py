"""The reference itself, against torch's attention on dense tensors: an oracle that knows no blocks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.window import Chunk, Window
from tests.kernels.attention.paged_batches import SHAPES, Batch, Shape, assert_matches, make_batch


def _dense_attention(batch: Batch, window: Window | None) -> torch.Tensor:
    """Attend from the batch's only sequence by repeating every KV head and building the whole mask."""
    seq_len, query_len = int(batch.metadata.seq_lens[0]), batch.query.shape[0]
    blocks = batch.metadata.block_tables[0][batch.metadata.block_tables[0] >= 0].long()
    group_size = batch.query.shape[1] // batch.key_cache.shape[2]
    key, value = (
        cache[blocks].flatten(0, 1)[:seq_len].transpose(0, 1).repeat_interleave(group_size, dim=0)
        for cache in (batch.key_cache, batch.value_cache)
    )
    mask = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
    if isinstance(window, Chunk):
        chunks = torch.arange(seq_len) // window.tokens
        mask &= chunks[:, None] == chunks[None, :]
    elif window is not None:  # a query's own key is one of the window's
        mask = mask.triu(1 - window)
    attended = scaled_dot_product_attention(
        batch.query.transpose(0, 1), key, value, attn_mask=mask[seq_len - query_len :], scale=batch.scale
    )
    return attended.transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 3, 20, 21, 22, 1000, Chunk(1), Chunk(6), Chunk(20), Chunk(21)])
@pytest.mark.parametrize("query_len", [1, 4, 21])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_one_sequence_equals_dense_attention(shape: Shape, query_len: int, window: Window | None) -> None:
    batch = make_batch([(query_len, 21)], shape)
    assert_matches(batch.expected(window), _dense_attention(batch, window))


def test_values_may_have_another_size_than_keys() -> None:
    batch = make_batch([(4, 21)], Shape())
    batch = replace(batch, value_cache=torch.randn(*batch.value_cache.shape[:3], 5))
    assert batch.expected().shape == (4, batch.query.shape[1], 5)
    assert_matches(batch.expected(), _dense_attention(batch, None))


def test_a_softcap_limits_scores_and_a_sink_takes_a_share_of_the_weights() -> None:
    batch = make_batch([(1, 1)], Shape(num_heads=2, num_kv_heads=1))
    value = batch.expected()  # the only token's own
    score = float(batch.query[0, 1].dot(batch.key_cache[batch.metadata.block_tables[0, 0], 0, 0])) * batch.scale
    sink = float(batch.inputs(None, "sinks").sinks[1])  # type: ignore[index]
    share = torch.tensor([score, sink]).softmax(dim=0)[0]
    assert_matches(batch.expected(None, "sinks")[0, 1], value[0, 1] * share)
    capped = torch.tensor([1.3 * math.tanh(score / 1.3), sink]).softmax(dim=0)[0]
    assert_matches(batch.expected(None, "softcap", "sinks")[0, 1], value[0, 1] * capped)


def test_sequences_do_not_see_each_other() -> None:
    shape = Shape()
    both = make_batch([(3, 20), (5, 9)], shape)
    first = make_batch([(3, 20)], shape)
    keys = both.metadata.block_tables[0, :2].long(), first.metadata.block_tables[0, :2].long()
    first.key_cache[keys[1]], first.value_cache[keys[1]] = both.key_cache[keys[0]], both.value_cache[keys[0]]
    alone = Batch(both.query[:3], first.key_cache, first.value_cache, first.metadata)
    torch.testing.assert_close(both.expected()[:3], alone.expected())
