"""Which changes of a batch make Triton compile again; and that the log notices those that do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.attention.triton import indexer
from kernels.attention.triton.backend import TritonBackend
from kernels.attention.triton.decode import reduce_splits_kernel
from kernels.cache.triton.pages import copy_pages_triton
from kernels.cache.triton.pending_tokens import take_pending_tokens_triton
from kernels.cache.triton.store_kvcache import store_kvcache_triton
from kernels.experts.triton.experts import experts_triton
from kernels.linear.triton import linear_triton
from kernels.sampling.triton.ops import TritonSampling
from tests.kernels.attention.paged_batches import PADDING, Batch, Shape, make_batch
from tests.kernels.gpu_variants import run_coded, run_coded_experts, run_fp8, run_latents, run_sparse
from tests.kernels.launch_log import KERNELS, LaunchLog
from tests.kernels.layer_ops_launches import MODELS, run_layer_ops
from tests.kernels.recurrent_launches import RECURRENT_MODELS, run_recurrent

SHAPE = Shape(num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
SPARSE = Shape(num_heads=1, num_kv_heads=1, head_dim=16)  # of which only the metadata is used
SIZES: dict[str, Any] = {"dtype": torch.bfloat16, "num_heads": 8, "num_index_heads": 32, "block_size": 16}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> LaunchLog:
    monkeypatch.setattr("kernels.attention.triton.backend._num_multiprocessors", lambda device: 132)
    return LaunchLog(monkeypatch)


def run(lengths: list[tuple[int, int]], shape: Shape = SHAPE, window: int | None = None) -> Batch:
    batch = make_batch(lengths, shape)
    batch.run(TritonBackend(), window)
    key = torch.zeros(batch.query.shape[0], shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
    store_kvcache_triton(key, key, batch.key_cache, batch.value_cache, batch.metadata.slot_mapping)
    return batch


@pytest.mark.parametrize("num_seqs", [1, 2, 15, 16, 17, 48])
def test_the_number_and_the_lengths_of_sequences_compile_nothing(log: LaunchLog, num_seqs: int) -> None:
    run([(1, 520), (3, 200)])
    expected = list(log.variants)
    run([(1, 255)] * num_seqs)
    run([(1, 5000)] * num_seqs + [(200, 300), (2, 9)])
    run([(1, 17), PADDING] * num_seqs)
    assert list(log.variants) == expected


def test_a_slice_of_another_alignment_compiles_nothing(log: LaunchLog) -> None:
    """A step's arrays may be parts of one buffer."""
    batch = run([(1, 600)])
    run([(1, 20), (2, 20)])
    warmed = list(log.variants)
    metadata = batch.metadata
    for name in ("cu_seqlens_q", "seq_lens", "slot_mapping"):
        values = getattr(metadata, name)
        shifted = torch.cat([values.new_zeros(1), values])[1:]
        assert shifted.data_ptr() % 16 != values.data_ptr() % 16
        object.__setattr__(metadata, name, shifted)
    batch.run(TritonBackend())
    key = torch.zeros(1, SHAPE.num_kv_heads, SHAPE.head_dim, dtype=SHAPE.dtype)
    store_kvcache_triton(key, key, batch.key_cache, batch.value_cache, metadata.slot_mapping)
    assert list(log.variants) == warmed


@pytest.mark.parametrize(
    ("shape", "window"), [(Shape(8, 2, 64, 32, torch.bfloat16), None), (SHAPE, 5), (Shape(8, 2, 64), None)]
)
def test_the_log_notices_what_compiles(log: LaunchLog, shape: Shape, window: int | None) -> None:
    run([(1, 20)])
    warmed = len(log.variants)
    run([(1, 20)], shape, window)
    assert len(log.variants) > warmed


@pytest.mark.parametrize("model", RECURRENT_MODELS)
def test_recurrent_layers_of_any_step_launch_what_the_first_ones_did(log: LaunchLog, model: str) -> None:
    run_recurrent(RECURRENT_MODELS[model], torch.bfloat16)
    warmed = list(log.variants)
    run_recurrent(RECURRENT_MODELS[model], torch.bfloat16, [(1, 1, 5), (1,) * 16, (2048, 17)], num_saves=3)
    assert list(log.variants) == warmed


def test_sparse_attention_of_any_step_launches_what_the_first_one_did(log: LaunchLog) -> None:
    """Also of a step whose tokens are chosen in slices, which begin anywhere in its arrays."""
    run_sparse(make_batch([(1, 520), (3, 200)], SPARSE).metadata, **SIZES)
    warmed = list(log.variants)
    for lengths in ([(1, 17)], [(1, 5000)] * 16 + [(200, 300), PADDING], [(7, 63), (1, 64)]):
        run_sparse(make_batch(lengths, SPARSE).metadata, **SIZES)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(indexer, "_SCORES_AT_ONCE", 3 * 200)
        run_sparse(make_batch([(1, 20), (30, 200)], SPARSE).metadata, **SIZES)
    assert list(log.variants) == warmed


def test_every_launch_says_whether_products_and_sums_are_fused(log: LaunchLog) -> None:
    """Triton's default changes in 3.10, and results would change with it."""
    run([(1, 5000), (2, 9)])
    for context in (520, 5000):  # where one program chooses the keys of a query, and where several do
        run_sparse(make_batch([(1, context)], SPARSE).metadata, **SIZES)
    run_layer_ops(MODELS["Qwen3-0.6B"])
    for model in ("Qwen3.5-0.8B", "Kimi-Linear-48B-A3B", "Nemotron-3-Nano"):
        run_recurrent(RECURRENT_MODELS[model], torch.bfloat16)
    run_latents(dtype=torch.bfloat16, shape=(32, 16, 4), block_size=16)
    linear_triton(torch.zeros(2, 16), torch.zeros(4, 16), None)
    run_coded(format="Q4_0", dtype=torch.float32, shape=(32, 512), has_bias=False)
    run_coded_experts(format="Q4_0", dtype=torch.float32, shape=(64, 32), option="gated")
    for activations in ("groups", "tokens"):
        run_fp8(activations=activations, dtype=torch.bfloat16, shape=(128, 512), option="bias")
    TritonSampling().warm_up(torch.zeros(2, 300))
    take_pending_tokens_triton(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    pages = torch.zeros(2, 3, 8, dtype=torch.int64)
    copy_pages_triton(pages, torch.zeros(1, dtype=torch.int64), pages, to_staging=True)
    gate_up, down = torch.zeros(4, 2 * 16, 16), torch.zeros(4, 16, 16)
    experts_triton(torch.zeros(100, 16), torch.zeros(100, 4), gate_up, down, 2, normalize=True)
    assert {variant.partition("(")[0] for variant in log.variants} == {kernel.__name__ for kernel in KERNELS}
    assert [variant for variant in log.variants if "enable_fp_fusion" not in variant] == []


def test_the_log_notices_a_specialised_integer(log: LaunchLog, monkeypatch: pytest.MonkeyPatch) -> None:
    run([(1, 20)])
    kernel = reduce_splits_kernel  # its strides are specialised on
    tensor = torch.zeros(64)
    for stride in (1, 8, 9, 16, 32):
        sizes = {"HEAD_DIM": 64, "DIM_PADDED": 64, "MAX_SPLITS": 2, "CHUNK": 2}
        kernel[(1,)](tensor, tensor, tensor, tensor, None, stride, 64, **sizes)
    assert len([variant for variant in log.variants if variant.startswith("reduce")]) == 3
