"""The batch that the layers see in a graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engine.kv.block_tables import BlockTables, TableChanges
from engine.kv.page_maps import PageMap
from engine.worker.graphs.batch_shape import BatchShape
from engine.worker.graphs.static_inputs import MAX_CHANGES, MAX_SAVES, StaticInputs, make_slab
from engine.worker.step_plan import RecurrentPlan

CPU = torch.device("cpu")


def test_every_sequence_of_a_graph_decodes_in_a_context_of_any_length() -> None:
    inputs = StaticInputs(BatchShape(3), make_slab([BatchShape(5)], 5, CPU), BlockTables(5, 7, CPU), 16)
    model_input = inputs.model_input()
    metadata = model_input.metadata
    assert (metadata.num_decodes, metadata.num_seqs, metadata.max_query_len, metadata.max_seq_len) == (3, 3, 1, 7 * 16)
    assert metadata.cu_seqlens_q.tolist() == [0, 1, 2, 3]
    assert metadata.block_tables.shape == (3, 7)
    assert metadata.slot_mapping.tolist() == [-1] * 3  # a capture writes nothing
    assert model_input.windows == ()
    assert model_input.recurrent is None


def test_chunks_are_padded_apart_from_decodes() -> None:
    shape = BatchShape(4, num_chunks=4, chunk_tokens=8)
    slab = make_slab([shape], 8, CPU, has_states=True)
    inputs = StaticInputs(shape, slab, BlockTables(8, 7, CPU), 16, has_states=True)
    metadata = inputs.model_input().metadata
    assert metadata.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4, 4, 4, 4, 12]  # a capture computes padding alone
    plan: Any = SimpleNamespace(
        token_ids=np.arange(50, 59),
        positions=np.arange(9),
        slot_mapping=np.arange(100, 109),
        cu_seqlens_q=np.array([0, 1, 2, 7, 9], dtype=np.int32),
        seq_lens=np.array([30, 31, 5, 42], dtype=np.int32),
        table_rows=np.array([5, 3, 2, 1]),
        table_changes=TableChanges(np.array([7]), np.array([6], dtype=np.int32)),  # the first block of row 1
        logit_indices=np.array([0, 1, 6, 8]),
        num_decodes=2,
        windows=[],
        recurrent=RecurrentPlan(
            *(np.array(values, dtype=np.int32) for values in ([4, 3, 7, 6], [0, 0, 1, 0], [6], [9]))
        ),
    )
    assert inputs.load(plan).tolist() == [0, 1, 8, 10]
    batch = inputs.model_input()
    assert batch.token_ids.tolist() == [50, 51, 0, 0, 52, 53, 54, 55, 56, 57, 58, 0]
    assert batch.positions.tolist() == [0, 1, 0, 0, 2, 3, 4, 5, 6, 7, 8, 0]
    metadata = batch.metadata
    assert metadata.slot_mapping.tolist() == [100, 101, -1, -1, 102, 103, 104, 105, 106, 107, 108, -1]
    assert metadata.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4, 9, 11, 11, 12]
    assert metadata.seq_lens.tolist() == [30, 31, 0, 0, 5, 42, 0, 0]
    assert metadata.block_tables[:, 0].tolist() == [-1, -1, -1, -1, -1, 6, -1, -1]  # the row 1 has got a block
    assert (metadata.num_decodes, metadata.num_seqs, metadata.max_query_len) == (4, 8, 8)
    recurrent = batch.recurrent
    assert recurrent is not None
    assert recurrent.slots.tolist() == [4, 3, -1, -1, 7, 6, -1, -1]
    assert recurrent.starts.tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert recurrent.save_tokens.tolist() == [
        8,
        *range(12 + 1, 12 + MAX_SAVES),
    ]  # those of padding ascend after all tokens
    assert recurrent.save_slots.tolist() == [9] + [-1] * (MAX_SAVES - 1)
    assert recurrent.num_decodes == 4


def test_a_capture_writes_neither_pages_nor_states() -> None:
    slab = make_slab([BatchShape(5)], 5, CPU, num_windows=2, has_states=True)
    page_maps = [PageMap(9, CPU), PageMap(9, CPU)]
    model_input = StaticInputs(
        BatchShape(3), slab, BlockTables(5, 7, CPU), 16, page_maps, has_states=True
    ).model_input()
    assert [window.slot_mapping.tolist() for window in model_input.windows] == [[-1] * 3] * 2
    assert [window.block_tables.shape for window in model_input.windows] == [(3, 7)] * 2
    recurrent = model_input.recurrent
    assert recurrent is not None
    assert (recurrent.slots.tolist(), recurrent.starts.tolist()) == ([-1] * 3, [0] * 3)
    assert (recurrent.num_decodes, len(recurrent.save_tokens), len(recurrent.save_slots)) == (3, 0, 0)


def test_windows_and_states_alone_take_room() -> None:
    """A step of a model with neither copies what it always has."""
    plain, with_windows, with_states = (
        make_slab([BatchShape(5)], 5, CPU, num_windows=windows, has_states=states).numel()
        for windows, states in [(0, False), (2, False), (0, True)]
    )
    changes = 2 * (5 + MAX_CHANGES)
    assert plain == 4 * 5 + 3 + 5 + changes
    assert with_windows == plain + 2 * (5 + changes)
    assert with_states == plain + 3
