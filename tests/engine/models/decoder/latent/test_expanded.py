"""Latents that are expanded for long prefills, against transformers, in torch: no CPU does it, GPUs do.

The backend pretends to expand latents, and computes what expands from them as the reference of attention does.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.config.shapes.index import IndexShape
from engine.models.config.shapes.latent import LatentShape
from engine.models.decoder import expanded_latents, loader
from engine.models.decoder.expanded_latents import LatentPart, longest_expanded, parts_of
from kernels.attention import reference
from kernels.attention.base import AttentionBackend, AttentionInputs
from kernels.attention.cpu_backend import CpuBackend
from kernels.attention_metadata import AttentionMetadata
from tests.engine.models.adapter.packed_steps import Chunk, packed_logits
from tests.engine.models.decoder.changed_models import TOLERANCE, largest_difference, load
from tests.engine.models.decoder.latent.latent_families import LATENT_FAMILIES, save_latent_model
from tests.engine.models.decoder.saved_models import Saved

LENGTHS = (8, 4, 75, 4, 30)
STEPS: list[list[Chunk]] = [  # sequences of 5 new tokens or more are expanded
    [(0, 0, 6)],
    [(0, 6, 7), (1, 0, 3), (2, 0, 40), (3, 0, 4), (4, 0, 6)],  # a decode, and chunks of both kinds in turn
    [(0, 7, 8), (1, 3, 4), (2, 40, 66), (4, 6, 29)],  # decodes beside chunks after prefixes, expanded together
    [(2, 66, 75), (4, 29, 30)],
]
Fault = Callable[[AttentionInputs], AttentionInputs]
DEEPSEEK = LatentShape(query_rank=1536, rank=512, nope_dim=128, rope_dim=64, value_dim=128)


class ExpandingBackend(CpuBackend):
    """Computes expanded latents, after a fault if there is one.

    Attributes:
        seen: how many sequences were expanded with each number of heads.
    """

    expands_latents = True

    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__()
        self.fault = fault
        self.seen: Counter[int] = Counter()

    def forward(self, inputs: AttentionInputs) -> torch.Tensor:
        if inputs.rope_cache is None:
            return super().forward(inputs)
        self.seen[inputs.num_heads] += inputs.metadata.num_seqs
        return reference.attention(inputs if self.fault is None else self.fault(inputs))


@pytest.fixture(autouse=True)
def _in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)


@pytest.fixture
def _five_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded_latents, "_is_faster", lambda shape, query_len: query_len >= 5)


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 385, (length,), generator=generator) for length in LENGTHS]


def error_of(model: Any, path: str, backend: AttentionBackend) -> float:
    with torch.inference_mode():
        expected = [model(tokens[None], use_cache=False).logits[0] for tokens in sequences()]
    return largest_difference(packed_logits(load(path), sequences(), steps=STEPS, backend=backend), expected)


@pytest.mark.usefixtures("_five_queries")
@pytest.mark.parametrize("name", LATENT_FAMILIES)
def test_logits_equal_those_of_transformers(saved: Callable[[str], Saved], name: str) -> None:
    backend, model = ExpandingBackend(), saved(name)
    assert error_of(model.model, model.path, backend) < TOLERANCE
    # With an indexer, contexts with more tokens than it chooses are absorbed: all but those of 6.
    num_layers = 3
    assert backend.seen == {4: num_layers * (2 if "index_topk" in LATENT_FAMILIES[name][1] else 6)}


@pytest.mark.usefixtures("_five_queries")
def test_groups_of_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace has room for two of five heads of the longest contexts, for four of a shorter one, and for all."""
    width, of_head, blocks = 32 + 16, 20 + 24, 76
    monkeypatch.setattr(expanded_latents, "_LEAST_PROGRAMS", 1)
    monkeypatch.setattr(expanded_latents, "WORKSPACE_BYTES", 4 * blocks * (width + 2 * of_head) + 4 * blocks)
    backend = ExpandingBackend()
    model, path = save_latent_model("deepseek-v3", tmp_path, num_attention_heads=5, num_key_value_heads=5)
    assert error_of(model, path, backend) < TOLERANCE
    num_layers = 3
    # Of 66 and 75 tokens 2 + 2 + 1 heads, of 40 3 + 2, and of 6, 6 and 29 all.
    assert backend.seen == {1: 2 * num_layers, 2: 5 * num_layers, 3: num_layers, 5: 3 * num_layers}


@pytest.mark.usefixtures("_five_queries")
def test_with_the_kernels_of_a_gpu(saved: Callable[[str], Saved]) -> None:
    """In Triton's interpreter."""
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("Triton compiles for the GPU here")
    from kernels.attention.triton.backend import TritonBackend

    model = saved("mistral-4")
    assert error_of(model.model, model.path, TritonBackend()) < TOLERANCE


# --- planted errors -------------------------------------------------------------------------------------------------


def _without_rope(inputs: AttentionInputs) -> AttentionInputs:
    assert inputs.rope_cache is not None
    return replace(inputs, rope_cache=torch.zeros_like(inputs.rope_cache))


def _exchanged(inputs: AttentionInputs) -> AttentionInputs:
    both = torch.cat((inputs.value_cache, inputs.key_cache), dim=-1)
    width = inputs.key_cache.shape[3]
    return replace(inputs, key_cache=both[..., :width], value_cache=both[..., width:])


def _with_metadata(change: Callable[[AttentionMetadata], dict[str, Any]]) -> Fault:
    return lambda inputs: replace(inputs, metadata=replace(inputs.metadata, **change(inputs.metadata)))


FAULTS: dict[str, Fault] = {
    "keys and values are exchanged": _exchanged,
    "the rotated elements are forgotten": _without_rope,
    "queries see one token less": _with_metadata(lambda batch: {"seq_lens": batch.seq_lens - 1}),
    "another block": _with_metadata(lambda batch: {"block_tables": batch.block_tables.roll(1, dims=1).abs()}),
    "another head's matrices": lambda inputs: replace(inputs, key_cache=inputs.key_cache.roll(1, dims=2)),
}


@pytest.mark.usefixtures("_five_queries")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(saved: Callable[[str], Saved], fault: str) -> None:
    model = saved("deepseek-v3")
    assert not error_of(model.model, model.path, ExpandingBackend(FAULTS[fault])) < 10 * TOLERANCE  # it may be NaN


# --- the parts of a step ---------------------------------------------------------------------------------------------


def step(lengths: list[tuple[int, int]], num_decodes: int = 0) -> AttentionMetadata:
    """Return a step of sequences that are given as (query_len, seq_len)."""
    counts = torch.tensor([0, *(count for count, _ in lengths)])
    width = -(-max(end for _, end in lengths) // 16)
    return AttentionMetadata(
        slot_mapping=torch.arange(int(counts.sum())),
        cu_seqlens_q=counts.cumsum(0).int(),
        seq_lens=torch.tensor([end for _, end in lengths], dtype=torch.int32),
        block_tables=torch.arange(len(lengths) * width, dtype=torch.int32).view(-1, width),
        num_decodes=num_decodes,
        max_query_len=max(count for count, _ in lengths),
        max_seq_len=max(end for _, end in lengths),
        host_lens=tuple(lengths[num_decodes:]),
    )


def divide(metadata: AttentionMetadata, shape: LatentShape = DEEPSEEK) -> list[LatentPart]:
    """Divide a step, of 16 heads in bfloat16."""
    return parts_of(metadata, shape, 16, torch.empty(1, 16, 576, dtype=torch.bfloat16))


def kinds(of_step: list[LatentPart]) -> Iterator[tuple[bool, int]]:
    """Yield whether each part is expanded, and how many sequences it has."""
    for part in of_step:
        yield part.block_ids is not None, part.metadata.num_seqs


def test_prefills_that_save_products_are_expanded() -> None:
    """171 queries of DeepSeek's sizes save more products of each key than its expansion costs."""
    assert list(kinds(divide(step([(170, 4096)])))) == [(False, 1)]
    assert list(kinds(divide(step([(171, 4096)])))) == [(True, 1)]


def test_a_step_is_divided_into_runs() -> None:
    decodes, short, long = [(1, 900), (1, 30)], (20, 20), (300, 1000)
    of_step = divide(step([*decodes, short, long, long, short, long], num_decodes=2))
    assert list(kinds(of_step)) == [(False, 3), (True, 2), (False, 1), (True, 1)]
    assert [(part.tokens.start, part.tokens.stop) for part in of_step] == [(0, 22), (22, 622), (622, 642), (642, 942)]
    assert [part.metadata.num_decodes for part in of_step] == [2, 0, 0, 0]
    assert of_step[1].metadata.cu_seqlens_q.tolist() == [0, 300, 600]
    assert of_step[1].metadata.block_tables.tolist() == [list(range(63)), list(range(63, 126))]
    assert of_step[1].block_ids is not None
    assert of_step[1].block_ids.tolist() == list(range(3 * 63, 5 * 63))
    assert of_step[2].metadata.block_tables.tolist() == [list(range(5 * 63, 6 * 63))]


def test_sequences_are_expanded_together_while_all_heads_fit() -> None:
    assert list(kinds(divide(step([(300, 9000)] * 7)))) == [(True, 3), (True, 3), (True, 1)]
    assert list(kinds(divide(step([(900, 40000), (300, 9000)])))) == [(True, 1), (True, 1)]


def test_a_long_context_is_expanded_where_few_heads_at_once_have_enough_programs() -> None:
    """Of 40,000 tokens eight heads fit, and a program has 128 queries of a head."""
    assert list(kinds(divide(step([(640, 40000)])))) == [(False, 1)]
    assert list(kinds(divide(step([(641, 40000)])))) == [(True, 1)]
    assert list(kinds(divide(step([(6016, 161000)])))) == [(False, 1)]
    assert list(kinds(divide(step([(6017, 161000)])))) == [(True, 1)]


def test_a_context_that_does_not_fit_is_absorbed() -> None:
    longest = longest_expanded(DEEPSEEK, 16, 2)
    assert 161_000 < longest < 161_400
    assert list(kinds(divide(step([(8192, longest), (8192, longest + 1)])))) == [(True, 1), (False, 1)]


def test_a_context_with_more_tokens_than_an_indexer_chooses_is_absorbed() -> None:
    index = IndexShape(num_heads=64, head_dim=128, top_k=2048, layers=frozenset([0]), rotation="halves")
    of_step = divide(step([(300, 2048), (300, 2049)]), replace(DEEPSEEK, index=index))
    assert list(kinds(of_step)) == [(True, 1), (False, 1)]


@pytest.mark.parametrize("query_len", [1, 300])
def test_the_division_does_not_keep_a_step_alive(query_len: int) -> None:
    batch = step([(query_len, 4096)])
    divide(batch)
    reference_to_it = weakref.ref(batch)
    del batch
    assert reference_to_it() is None


def test_a_step_with_lengths_that_only_the_device_knows_is_not_divided() -> None:
    (part,) = divide(replace(step([(300, 4096)]), host_lens=()))
    assert (part.tokens, part.block_ids) == (slice(None), None)
