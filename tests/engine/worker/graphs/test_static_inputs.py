"""The batch that the layers see in a graph."""

from __future__ import annotations

import torch

from engine.kv.block_tables import BlockTables
from engine.kv.page_maps import PageMap
from engine.worker.graphs.static_inputs import MAX_CHANGES, StaticInputs, make_slab

CPU = torch.device("cpu")


def test_every_sequence_of_a_graph_decodes_in_a_context_of_any_length() -> None:
    inputs = StaticInputs(3, make_slab(5, CPU), BlockTables(5, 7, CPU), 16)
    model_input = inputs.model_input()
    metadata = model_input.metadata
    assert (metadata.num_decodes, metadata.num_seqs, metadata.max_query_len, metadata.max_seq_len) == (3, 3, 1, 7 * 16)
    assert metadata.cu_seqlens_q.tolist() == [0, 1, 2, 3]
    assert metadata.block_tables.shape == (3, 7)
    assert metadata.slot_mapping.tolist() == [-1] * 3  # a capture writes nothing
    assert model_input.windows == ()
    assert model_input.recurrent is None


def test_a_capture_writes_neither_pages_nor_states() -> None:
    slab = make_slab(5, CPU, num_windows=2, has_states=True)
    page_maps = [PageMap(9, CPU), PageMap(9, CPU)]
    model_input = StaticInputs(3, slab, BlockTables(5, 7, CPU), 16, page_maps, has_states=True).model_input()
    assert [window.slot_mapping.tolist() for window in model_input.windows] == [[-1] * 3] * 2
    assert [window.block_tables.shape for window in model_input.windows] == [(3, 7)] * 2
    recurrent = model_input.recurrent
    assert recurrent is not None
    assert (recurrent.slots.tolist(), recurrent.starts.tolist()) == ([-1] * 3, [0] * 3)
    assert (recurrent.num_decodes, len(recurrent.save_tokens), len(recurrent.save_slots)) == (3, 0, 0)


def test_windows_and_states_alone_take_room() -> None:
    """A step of a model with neither copies what it always has."""
    plain, with_windows, with_states = (
        make_slab(5, CPU, num_windows=windows, has_states=states).numel()
        for windows, states in [(0, False), (2, False), (0, True)]
    )
    changes = 2 * (5 + MAX_CHANGES)
    assert plain == 4 * 5 + 3 + 5 + changes
    assert with_windows == plain + 2 * (5 + changes)
    assert with_states == plain + 3
