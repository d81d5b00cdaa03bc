"""BatchGraphs: the graphs of one rank, for steps of few tokens.

Launching a step's kernels one by one takes the host longer than a GPU needs to compute a small batch. A graph is one
launch, and there is one for each of a few shapes of batches; a step is padded to the next of them. A graph ends with
the hidden states: logits are computed outside it, because those of every size would take gigabytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from engine.errors import ConfigError
from engine.kv.block_tables import BlockTables
from engine.kv.page_maps import PageMap
from engine.worker.graphs.batch_shape import MAX_CHUNKS, BatchShape, chunk_sizes, decode_sizes, mixed_decode_sizes
from engine.worker.graphs.device import GraphDevice
from engine.worker.graphs.static_inputs import MAX_CHANGES, MAX_SAVES, StaticInputs, make_slab
from engine.worker.step_plan import ModelInput, StepPlan

__all__ = ["BatchGraph", "BatchGraphs"]

Forward = Callable[[ModelInput], torch.Tensor]  # computes the hidden states [num_tokens, hidden_size]


class BatchGraph:
    """The graph of one shape. ``load`` a step, then ``replay``."""

    def __init__(self, inputs: StaticInputs, hidden: torch.Tensor, replay: Callable[[], None]) -> None:
        self.inputs = inputs
        self._hidden = hidden
        self._replay = replay

    def replay(self) -> torch.Tensor:
        """Compute the loaded step; return its hidden states, [num_tokens, hidden_size], valid until the next replay."""
        self._replay()
        return self._hidden


class BatchGraphs:
    """The graphs of all shapes, after ``capture``.

    Args:
        device: captures them.
        forward: what they compute. Except its argument, all that it reads must stay at its address: weights, KV cache.
        block_tables: the rank's block tables.
        block_size: tokens per block.
        page_maps: the rank's, of each sliding window that has pages of its own.
        has_states: whether the model has recurrent layers.
        max_chunk_tokens: of the largest graph's chunks together; 0: only decodes get graphs.
    """

    def __init__(
        self,
        device: GraphDevice,
        forward: Forward,
        block_tables: BlockTables,
        block_size: int,
        page_maps: Sequence[PageMap] = (),
        *,
        has_states: bool = False,
        max_chunk_tokens: int = 0,
    ) -> None:
        self._device = device
        self._forward = forward
        self._block_tables, self._block_size = block_tables, block_size
        self._page_maps, self._has_states = page_maps, has_states
        max_num_seqs = block_tables.shape[0]
        self._decodes = decode_sizes(max_num_seqs)
        self._mixed_decodes = mixed_decode_sizes(max_num_seqs)
        self._chunks = chunk_sizes(max_chunk_tokens) if max_chunk_tokens else []
        self._max_changes = max_num_seqs + MAX_CHANGES
        self._graphs: dict[BatchShape, BatchGraph] = {}

    @property
    def shapes(self) -> list[BatchShape]:
        """The shapes that get a graph, those with the most tokens first."""
        shapes = [BatchShape(count) for count in self._decodes]
        shapes += [BatchShape.mixed(count, tokens) for count in self._mixed_decodes for tokens in self._chunks]
        return sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True)

    def find(self, plan: StepPlan) -> BatchGraph | None:
        """Return the graph that computes a step; None if none is captured for it.

        A step that changes much of the block tables or of a page map, as one after a swap does, is computed without a
        graph too, and so are those that save many states, or compute log-probabilities of a prompt.
        """
        if len(plan.prompt_logit_indices) or len(plan.table_changes.entries) > self._max_changes:
            return None
        if any(len(window.changed_blocks) > self._max_changes for window in plan.windows):
            return None
        num_decodes = plan.num_decodes
        num_chunks, chunk_tokens = len(plan.seq_lens) - num_decodes, len(plan.token_ids) - num_decodes
        if plan.recurrent is not None and len(plan.recurrent.save_tokens) > (MAX_SAVES if num_chunks else 0):
            return None
        if not num_chunks:
            return self._graphs[BatchShape(self._decodes[bisect_left(self._decodes, num_decodes)])]
        if num_chunks > MAX_CHUNKS or not self._chunks or chunk_tokens > self._chunks[-1]:
            return None
        decodes = self._mixed_decodes[bisect_left(self._mixed_decodes, num_decodes)]
        return self._graphs[BatchShape.mixed(decodes, self._chunks[bisect_left(self._chunks, chunk_tokens)])]

    @torch.inference_mode()
    def capture(self) -> int:
        """Capture every graph; return the bytes of the device that they take.

        Raises:
            ConfigError: if the device refuses, for lack of memory or for what a step does.
        """
        before = self._device.used_memory()
        shapes = self.shapes
        try:
            self._graphs = self._capture_all(shapes)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"CUDA graphs of {len(shapes)} batches, up to {shapes[0].num_tokens} tokens, cannot be captured "
                f"({reason})",
                remedy="set enforce_eager to serve without them, or lower gpu_memory_utilization if memory is short",
            ) from error
        return max(0, self._device.used_memory() - before)

    def _capture_all(self, shapes: list[BatchShape]) -> dict[BatchShape, BatchGraph]:
        """Return a graph for each of ``shapes``.

        The largest comes first: its scratch memory and its output are enough for all others.
        """
        tables, page_maps = self._block_tables, self._page_maps
        slab = make_slab(
            shapes, tables.shape[0], tables.device, num_windows=len(page_maps), has_states=self._has_states
        )
        hidden: torch.Tensor | None = None
        graphs: dict[BatchShape, BatchGraph] = {}
        for shape in shapes:
            inputs = StaticInputs(shape, slab, tables, self._block_size, page_maps, has_states=self._has_states)
            if hidden is None:
                hidden = self._forward(inputs.model_input())
            graphs[shape] = self._capture_one(inputs, hidden[: shape.num_tokens])
        return graphs

    def _capture_one(self, inputs: StaticInputs, hidden: torch.Tensor) -> BatchGraph:
        def run() -> None:
            hidden.copy_(self._forward(inputs.model_input()))

        return BatchGraph(inputs, hidden, self._device.capture(run))
