"""StepGraphs: whether a rank's small steps are replayed from CUDA graphs, and the graphs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter

import torch

from engine.kv.block_tables import BlockTables
from engine.kv.kv_cache import KVCache
from engine.kv.page_maps import PageMap
from engine.models.decoder.decoder import Decoder
from engine.worker.graphs.batch_graphs import BatchGraph, BatchGraphs
from engine.worker.graphs.device import CudaGraphDevice
from engine.worker.model_shard import ModelShard
from engine.worker.step_plan import ModelInput, StepPlan

__all__ = ["StepGraphs"]

logger = logging.getLogger(__name__)

CHUNK_TOKENS_OF_16_GB = 512  # that get graphs, of a model with as large weights, and at least of any


class StepGraphs:
    """The CUDA graphs of one rank, after ``capture``.

    Args:
        shard: the rank's model, loaded.
    """

    def __init__(self, shard: ModelShard) -> None:
        self._shard = shard
        self._graphs: BatchGraphs | None = None

    @property
    def are_used(self) -> bool:
        """Whether small steps are replayed from CUDA graphs."""
        return self._shard.device.type == "cuda" and self.why_eager is None

    @property
    def why_eager(self) -> str | None:
        """Why all steps are computed without CUDA graphs; None if graphs are used, or if the device is a CPU."""
        if self._shard.device.type == "cpu":
            return None
        if self._shard.config.enforce_eager:
            return "enforce_eager is set"
        if self._shard.config.tensor_parallel_size > 1:
            return "their capture with the collectives of tensor-parallel ranks has not been tested"
        if not isinstance(self._shard.model, Decoder):
            return "the modules of transformers may wait for the GPU"
        return None

    @property
    def _max_chunk_tokens(self) -> int:
        """The most tokens of prompts that a GPU computes in less time than the host takes to launch their kernels.

        With 8B parameters an H200 computes 512 tokens in the 14 ms that its host took for a step without a graph.
        """
        tokens = CHUNK_TOKENS_OF_16_GB * 16e9 / max(self._shard.weight_bytes, 1)
        return min(self._shard.config.tokens_per_step, max(CHUNK_TOKENS_OF_16_GB, int(tokens)))

    def find(self, plan: StepPlan) -> BatchGraph | None:
        """Return the graph that computes a step; None if there is none."""
        return None if self._graphs is None else self._graphs.find(plan)

    def measure(self) -> int:
        """Capture all graphs once with a cache of one block, and drop them; return the bytes that they take.

        A graph holds the addresses of the cache, and the cache takes all memory that is left. So the graphs' memory is
        measured before the cache is allocated.
        """
        if not self.are_used:
            return 0
        cache = self._shard.make_cache()
        return self._make(cache, self._shard.make_tables(), self._shard.make_page_maps(cache)).capture()

    def capture(self, kv_cache: KVCache, block_tables: BlockTables, page_maps: Sequence[PageMap]) -> None:
        """Capture the graphs on this cache, these tables and these maps, if graphs are used."""
        if self.are_used:
            started = perf_counter()
            self._graphs = self._make(kv_cache, block_tables, page_maps)
            num_bytes = self._graphs.capture()
            shapes = self._graphs.shapes
            logger.info(
                "Capturing CUDA graphs of %d batches, up to %d tokens, took %.2f seconds and %.2f GiB",
                len(shapes),
                shapes[0].num_tokens,
                perf_counter() - started,
                num_bytes / 2**30,
            )
        elif self.why_eager is not None and self._shard.rank == 0:
            logger.info("Steps run without CUDA graphs: %s", self.why_eager)

    def _make(self, kv_cache: KVCache, block_tables: BlockTables, page_maps: Sequence[PageMap]) -> BatchGraphs:
        shard = self._shard

        def forward(model_input: ModelInput) -> torch.Tensor:
            return shard.forward(model_input, kv_cache)

        return BatchGraphs(
            CudaGraphDevice(shard.device),
            forward,
            block_tables,
            shard.block_size,
            page_maps,
            has_states=kv_cache.sizes.num_slots > 0,
            max_chunk_tokens=self._max_chunk_tokens if shard.backend.captures_chunks else 0,
        )
