"""StepGraphs: whether a rank's decodes are replayed from CUDA graphs, and the graphs."""

from __future__ import annotations

import logging
from time import perf_counter

import torch

from engine.kv.block_tables import BlockTables
from engine.kv.kv_cache import KVCache
from engine.models.decoder.decoder import Decoder
from engine.models.decoder.forward_context import ForwardContext
from engine.worker.graphs.decode_graphs import DecodeGraph, DecodeGraphs
from engine.worker.graphs.device import CudaGraphDevice
from engine.worker.model_shard import ModelShard
from engine.worker.step_plan import StepPlan
from kernels.attention_metadata import AttentionMetadata

__all__ = ["StepGraphs"]

logger = logging.getLogger(__name__)


class StepGraphs:
    """The CUDA graphs of one rank, after ``capture``.

    Args:
        shard: the rank's model, loaded.
    """

    def __init__(self, shard: ModelShard) -> None:
        self._shard = shard
        self._graphs: DecodeGraphs | None = None

    @property
    def are_used(self) -> bool:
        """Whether steps that only decode are replayed from CUDA graphs."""
        return self._shard.device.type == "cuda" and self.why_eager is None

    @property
    def why_eager(self) -> str | None:
        """Why decodes are computed without CUDA graphs; None if graphs are used, or if the device is a CPU."""
        if self._shard.device.type == "cpu":
            return None
        if self._shard.config.enforce_eager:
            return "enforce_eager is set"
        if self._shard.config.tensor_parallel_size > 1:
            return "their capture with the collectives of tensor-parallel ranks has not been tested"
        if not isinstance(self._shard.model, Decoder):
            return "the modules of transformers may wait for the GPU"
        if not self._shard.page_sizes.are_blocks_alone:
            return "states of recurrent layers are not part of them yet"
        return None

    def find(self, plan: StepPlan) -> DecodeGraph | None:
        """Return the graph that computes a step; None if there is none."""
        return None if self._graphs is None else self._graphs.find(plan)

    def measure(self) -> int:
        """Capture all graphs once with a cache of one block, and drop them; return the bytes that they take.

        A graph holds the addresses of the cache, and the cache takes all memory that is left. So the graphs' memory is
        measured before the cache is allocated.
        """
        shard = self._shard
        return self._make(shard.make_cache(), shard.make_tables()).capture() if self.are_used else 0

    def capture(self, kv_cache: KVCache, block_tables: BlockTables) -> None:
        """Capture the graphs of decodes on this cache and these tables, if they are used."""
        if self.are_used:
            started = perf_counter()
            self._graphs = self._make(kv_cache, block_tables)
            num_bytes = self._graphs.capture()
            logger.info(
                "Capturing CUDA graphs of %d batch sizes, up to %d, took %.2f seconds and %.2f GiB",
                len(self._graphs.sizes),
                self._graphs.sizes[-1],
                perf_counter() - started,
                num_bytes / 2**30,
            )
        elif self.why_eager is not None and self._shard.rank == 0:
            logger.info("Decodes run without CUDA graphs: %s", self.why_eager)

    def _make(self, kv_cache: KVCache, block_tables: BlockTables) -> DecodeGraphs:
        shard = self._shard

        def forward(token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
            hidden: torch.Tensor = shard.model(token_ids, positions, ForwardContext(shard.backend, metadata, kv_cache))
            return hidden

        return DecodeGraphs(CudaGraphDevice(shard.device), forward, block_tables, shard.block_size)
