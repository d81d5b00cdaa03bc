"""ModelWorker: one tensor-parallel rank, with its shard of the model and of the KV cache on one device.

Every rank executes the same StepPlan at the same time. A worker knows the other ranks only through the collectives
inside the model; ``WorkerPool`` calls the workers, and the scheduler decides what a step computes. Without tensor
parallelism there is one worker with the whole model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from engine.config import EngineConfig
from engine.kv.block_tables import BlockTables
from engine.kv.kv_cache import KVCache
from engine.kv.page_maps import PageMap
from engine.kv.pool_sizes import PoolSizes
from engine.kv.shared_host import HostShare
from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.tensor_parallel import TensorParallel
from engine.worker.device import set_rank_threads
from engine.worker.drafting.draft_passes import DraftPasses
from engine.worker.memory import gpu_memory_for_cache, host_memory_for_cache, pools_that_fit
from engine.worker.model_shard import ModelShard
from engine.worker.step_graphs import StepGraphs
from engine.worker.step_plan import StepPlan
from engine.worker.warm_up import WarmUp
from kernels.device_copy import use_device, wait_for_device

__all__ = ["ModelWorker"]

logger = logging.getLogger(__name__)


class ModelWorker:
    """A rank's model and KV cache. The constructor checks the config against the model and loads no weights.

    Args:
        config: options of the engine.
        rank: this one.
        host: the address of this host if each rank has one of its own; empty: all ranks share this host.

    Attributes:
        shard: the rank's part of the model, which ``load`` loads.
        graphs: the CUDA graphs of small steps.
        kv_cache: the KV cache, after ``allocate``.
        draft_passes: of the draft model on a GPU, after ``allocate``; None without one.
        block_tables: the block tables of the last plan's batch, after ``allocate``.
        page_maps: the pages that hang on blocks, of each sliding window, after ``allocate``.

    Raises:
        ConfigError: if an option does not fit the model, the backend or the machine.
        ModelLoadError: if the checkpoint cannot be served.
    """

    kv_cache: KVCache
    block_tables: BlockTables
    page_maps: list[PageMap]

    def __init__(self, config: EngineConfig, rank: int = 0, host: str = "") -> None:
        self.config = config
        self.rank = rank
        self._host = host
        self.shard = ModelShard(config, rank, owns_host=bool(host))
        self.graphs = StepGraphs(self.shard)
        self.draft_passes: DraftPasses | None = None
        self._parallel = TensorParallel()
        self._graph_bytes = 0

    def load(self, rendezvous: str) -> None:
        """Join the other ranks at ``rendezvous``, see TensorParallel.join, and load this rank's shard of the weights.

        Raises:
            ModelLoadError: if the checkpoint cannot be served.
        """
        device = self.shard.device
        use_device(device)
        if device.type == "cpu":
            has_kernels = self.shard.backend.uses_cpu_kernels
            set_rank_threads(self.config, self.rank, has_cpu_kernels=has_kernels, owns_host=bool(self._host))
        size = self.config.tensor_parallel_size
        self._parallel = TensorParallel.join(self.rank, size, device, rendezvous, self._host)
        self.shard.load(self._parallel)

    def abort(self) -> None:
        """Make collectives that wait for other ranks fail. May be called from any thread."""
        self._parallel.abort()

    @torch.inference_mode()
    def execute(
        self,
        plan: StepPlan,
        on_prompt_logits: Callable[[torch.Tensor], None] | None = None,
        sampled: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Compute one step. Every rank must execute the same plans, and all of them in order.

        Args:
            on_prompt_logits: is called with the logits of the plan's ``prompt_logit_indices``, slice by slice, each
                [n, vocab_size], before this method returns; on rank 0 only.
            sampled: what the last step sampled, on the device; the plan may take token ids from it.

        Returns:
            On rank 0 the logits [num_logits, vocab_size] of the plan's ``logit_indices``; None if there are none.
        """
        use_device(self.shard.device)
        self._copy_pages(plan)
        if not len(plan.token_ids):  # a step may only copy blocks or states
            return None
        self.kv_cache.expect(plan.slot_mapping, [window.slot_mapping for window in plan.windows])
        if plan.recurrent is not None:
            self.kv_cache.expect_slots(plan.recurrent.slots)
            self.kv_cache.expect_slots(plan.recurrent.save_slots)
        if (graph := self.graphs.find(plan)) is not None:
            logit_indices = graph.inputs.load(plan)
            plan.take_sampled(graph.inputs.token_ids, sampled, graph.inputs.recurrent)
            hidden = graph.replay()
            return self.shard.model.compute_logits(hidden, logit_indices) if len(logit_indices) else None
        model_input = plan.to_device(self.block_tables, self.shard.block_size, self.page_maps)
        plan.take_sampled(model_input.token_ids, sampled, model_input.recurrent)
        hidden = self.shard.forward(model_input, self.kv_cache)
        if len(plan.prompt_logit_indices):
            self.shard.compute_prompt_logits(hidden, model_input.prompt_logit_indices, on_prompt_logits)
        return self.shard.model.compute_logits(hidden, model_input.logit_indices) if len(plan.logit_indices) else None

    @torch.inference_mode()
    def copy_pages(self, plan: StepPlan) -> None:
        """Make the copies of a step that computes nothing, and wait for them."""
        use_device(self.shard.device)
        self._copy_pages(plan)
        wait_for_device(self.shard.device)

    def _copy_pages(self, plan: StepPlan) -> None:
        for pool, copies in zip(self.kv_cache.pools, plan.copies, strict=True):
            pool.make(copies)

    # --- start --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def warm_up(self, batches: list[tuple[int, int]]) -> None:
        """On a GPU, record the peak memory of a step; then run ``batches``, so that their kernels are compiled.

        Args:
            batches: rank 0's ``ModelShard.warm_up_batches``: the ranks run the same ones, because a step is a
                collective.
        """
        started, device = perf_counter(), self.shard.device
        use_device(device)
        warm_up = WarmUp(self.shard)
        if device.type == "cuda":
            warm_up.run_largest_step()
        warm_up.run_batches(batches)
        if self.config.num_blocks is None:  # else no memory is measured
            self._graph_bytes = self.graphs.measure()
            if (passes := self._new_draft_passes(self.shard.make_cache(), None)) is not None:
                self._graph_bytes += passes.measure()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            if self.rank == 0:
                logger.info("Warm-up took %.2f seconds, with %d batches", perf_counter() - started, 1 + len(batches))

    def measure_pools(self) -> PoolSizes:
        """Return the pages that fit in memory, at most what ``max_num_seqs`` sequences of full length can use.

        Raises:
            ConfigError: if not even one block fits, or not one sequence.
        """
        shard, sizes = self.shard, self.shard.page_sizes
        useful = self.config.max_num_seqs * sizes.bytes_of_sequence(
            shard.max_model_len, self.config.state_snapshots + 1
        )
        if shard.device.type == "cpu":
            memory = host_memory_for_cache(self.config)
        else:
            memory = gpu_memory_for_cache(self.config, shard.device, useful, self._graph_bytes)
        return pools_that_fit(self.config, sizes, memory, shard.max_model_len)

    def allocate(self, sizes: PoolSizes, shares: Sequence[HostShare] = ()) -> None:
        """Allocate the KV cache, its block tables and the scratch memory of steps.

        Args:
            sizes: of the pools; equal on every rank, because the ranks share the block tables.
            shares: the host pools that all ranks share, if they do.
        """
        shard = self.shard
        if isinstance(shard.model, CpuDecoder):
            shard.model.reserve(min(shard.num_preallocated_tokens, sizes.num_blocks * shard.block_size))
        self.kv_cache = shard.make_cache(sizes, shares)
        self.block_tables = shard.make_tables(sizes.num_blocks)
        self.page_maps = shard.make_page_maps(self.kv_cache)
        self.draft_passes = self._new_draft_passes(self.kv_cache, sizes.num_blocks)

    def _new_draft_passes(self, cache: KVCache, num_blocks: int | None) -> DraftPasses | None:
        """Return the passes of a draft model on a GPU, without graphs."""
        shard = self.shard
        if shard.draft is None or shard.device.type == "cpu":
            return None
        tables = shard.make_tables(num_blocks)
        return DraftPasses(shard.draft, shard.draft.part_of(cache), tables, uses_graphs=not self.config.enforce_eager)

    def capture_graphs(self) -> None:
        """Capture the graphs of small steps, with the KV cache, block tables and page maps of ``allocate``."""
        use_device(self.shard.device)
        self.graphs.capture(self.kv_cache, self.block_tables, self.page_maps)
        if (passes := self.draft_passes) is not None and (num_bytes := passes.capture()):
            logger.info("Draft model: capturing %d CUDA graphs took %.2f GiB", passes.num_graphs, num_bytes / 2**30)
