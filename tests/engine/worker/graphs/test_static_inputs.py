"""The batch that attention sees in a graph."""

from __future__ import annotations

import torch

from engine.kv.block_tables import BlockTables
from engine.worker.graphs.static_inputs import StaticInputs, make_slab

CPU = torch.device("cpu")


def test_every_sequence_of_a_graph_decodes_in_a_context_of_any_length() -> None:
    inputs = StaticInputs(3, make_slab(5, CPU), BlockTables(5, 7, CPU), 16)
    metadata = inputs.metadata()
    assert (metadata.num_decodes, metadata.num_seqs, metadata.max_query_len, metadata.max_seq_len) == (3, 3, 1, 7 * 16)
    assert metadata.cu_seqlens_q.tolist() == [0, 1, 2, 3]
    assert metadata.block_tables.shape == (3, 7)
    assert metadata.slot_mapping.tolist() == [-1] * 3  # a capture writes nothing
