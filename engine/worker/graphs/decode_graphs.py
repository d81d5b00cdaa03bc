"""DecodeGraphs: the graphs of one rank, for steps that only decode.

Launching a step's kernels one by one takes the host longer than a GPU needs to compute a small batch. A graph is one
launch, and there is one for each of a few batch sizes; a step is padded to the next of them. A graph ends with the
hidden states: logits are computed outside it, because those of every size would take gigabytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from engine.errors import ConfigError
from engine.kv.block_tables import BlockTables
from engine.kv.page_maps import PageMap
from engine.worker.graphs.device import GraphDevice
from engine.worker.graphs.static_inputs import MAX_CHANGES, StaticInputs, make_slab
from engine.worker.step_plan import ModelInput, StepPlan

__all__ = ["DecodeGraph", "DecodeGraphs", "graph_sizes"]

Forward = Callable[[ModelInput], torch.Tensor]  # computes the hidden states [num_tokens, hidden_size]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes that get a graph, ascending: 1, 2, 4, then at least every eighth up to ``max_num_seqs``.

    Above 256 the steps grow with the size, so that padding adds at most a sixteenth.
    """
    sizes, size = [1, 2, 4], 8
    while size < max_num_seqs:
        sizes.append(size)
        size += max(8, (1 << size.bit_length() - 1) // 16)
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class DecodeGraph:
    """The graph of one batch size. ``load`` a step, then ``replay``."""

    def __init__(self, inputs: StaticInputs, hidden: torch.Tensor, replay: Callable[[], None]) -> None:
        self.inputs = inputs
        self._hidden = hidden
        self._replay = replay

    def replay(self) -> torch.Tensor:
        """Compute the loaded step; return its hidden states, [size, hidden_size], valid until the next replay."""
        self._replay()
        return self._hidden


class DecodeGraphs:
    """The graphs of all batch sizes, after ``capture``.

    Args:
        device: captures them.
        forward: what they compute. Except its argument, all that it reads must stay at its address: weights, KV cache.
        block_tables: the rank's block tables.
        block_size: tokens per block.
        page_maps: the rank's, of each sliding window that has pages of its own.
        has_states: whether the model has recurrent layers.
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
    ) -> None:
        self._device = device
        self._forward = forward
        self._block_tables, self._block_size = block_tables, block_size
        self._page_maps, self._has_states = page_maps, has_states
        self.sizes = graph_sizes(block_tables.shape[0])
        self._max_changes = block_tables.shape[0] + MAX_CHANGES
        self._graphs: list[DecodeGraph] = []  # one for each number of sequences

    def find(self, plan: StepPlan) -> DecodeGraph | None:
        """Return the graph that computes a step; None if it is not captured: it does more than decode.

        A step that changes much of the block tables or of a page map, as one after a swap does, is computed without a
        graph too, and so would be one that saves states.
        """
        num_seqs = len(plan.seq_lens)
        is_decode = plan.num_decodes == num_seqs and not len(plan.prompt_logit_indices)
        if not is_decode or len(plan.table_changes.entries) > self._max_changes:
            return None
        if any(len(window.changed_blocks) > self._max_changes for window in plan.windows):
            return None
        if plan.recurrent is not None and len(plan.recurrent.save_tokens):
            return None
        return self._graphs[num_seqs]

    @torch.inference_mode()
    def capture(self) -> int:
        """Capture every graph; return the bytes of the device that they take.

        Raises:
            ConfigError: if the device refuses, for lack of memory or for what a step does.
        """
        before = self._device.used_memory()
        try:
            graphs = self._capture_all()
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"CUDA graphs of {len(self.sizes)} batch sizes, up to {self.sizes[-1]}, cannot be captured ({reason})",
                remedy="set enforce_eager to serve without them, or lower gpu_memory_utilization if memory is short",
            ) from error
        self._graphs = [graphs[bisect_left(self.sizes, count)] for count in range(self.sizes[-1] + 1)]
        return max(0, self._device.used_memory() - before)

    def _capture_all(self) -> list[DecodeGraph]:
        """Return a graph for each of ``sizes``.

        The largest comes first: its scratch memory and its output are enough for all others.
        """
        has_states, num_windows = self._has_states, len(self._page_maps)
        slab = make_slab(self.sizes[-1], self._block_tables.device, num_windows=num_windows, has_states=has_states)
        hidden: torch.Tensor | None = None
        graphs: list[DecodeGraph] = []
        for size in reversed(self.sizes):
            inputs = StaticInputs(
                size, slab, self._block_tables, self._block_size, self._page_maps, has_states=has_states
            )
            if hidden is None:
                hidden = self._forward(inputs.model_input())
            graphs.append(self._capture_one(inputs, hidden[:size]))
        return graphs[::-1]

    def _capture_one(self, inputs: StaticInputs, hidden: torch.Tensor) -> DecodeGraph:
        def run() -> None:
            hidden.copy_(self._forward(inputs.model_input()))

        return DecodeGraph(inputs, hidden, self._device.capture(run))
