"""ModelRunner: computes one scheduled batch on all ranks, and samples from its logits.

It turns a SchedulerOutput into a StepPlan, which the workers execute, and samples on rank 0. The scheduler decides
which tokens are computed, and the block manager where their keys and values go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain, islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from engine.config import EngineConfig, EngineInfo
from engine.errors import ConfigError
from engine.kv.page_maps import HostPageMap
from engine.kv.pool_sizes import PoolSizes, smallest
from engine.kv.shared_host import host_shares
from engine.kv.tiers.host_memory import HostMemory
from engine.models.config.files.generation_defaults import GenerationDefaults
from engine.outputs import TokenLogprobs
from engine.sampling.pending import PendingTokens
from engine.sampling.ranking import PendingLogprobs
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput, StepTimes
from engine.sequence import Sequence, SequenceGroup
from engine.worker.drafting.cpu_draft_model import CpuDraftModel
from engine.worker.drafting.cpu_hidden_state_model import CpuHiddenStateModel
from engine.worker.drafting.gpu_draft_model import GpuDraftModel
from engine.worker.drafting.prefix_marks import HostPrefixMarks
from engine.worker.memory import host_pools_for, pools_of_blocks
from engine.worker.ranks.rank_hosts import RankHosts
from engine.worker.step_planner import StepPlanner
from engine.worker.step_timer import StepTimer
from engine.worker.worker_pool import WorkerPool
from kernels.attention.window import Chunk, most_keys
from kernels.device_copy import to_device

if TYPE_CHECKING:
    from engine.structured_outputs.bitmask import MaskBuilder

__all__ = ["ModelRunner"]

logger = logging.getLogger(__name__)


class ModelRunner:
    """One model with its KV cache, on one or several tensor-parallel ranks.

    Args:
        config: options of the engine.
        hosts: where the ranks run; None: all on this host.

    Attributes:
        draft_model: the draft model, or the MTP layer; None if the config has neither.

    Raises:
        ConfigError: if an option does not fit the model, the backend or the machine.
        ModelLoadError: if the checkpoint cannot be served.
        EngineDeadError: if a rank dies while it loads.
    """

    def __init__(self, config: EngineConfig, hosts: RankHosts | None = None) -> None:
        self.config = config
        if hosts is not None and hosts.own_address and self._shares_host_pools:
            name, value = next(iter(config.shared_memory_options.items()))
            raise ConfigError(
                "needs all ranks on one host, whose memory they share",
                param=name,
                value=value,
                remedy="turn it off, or place all ranks on one host",
            )
        started = perf_counter()
        self.workers = WorkerPool(config, hosts)
        worker, shard = self.workers.local, self.workers.local.shard
        size = shard.weight_bytes * config.tensor_parallel_size / 2**30
        logger.info("Model loading took %.2f GiB and %.2f seconds", size, perf_counter() - started)
        self.device, self.dtype, self.backend = shard.device, shard.dtype, shard.backend
        self.model_config = shard.model_config
        self.max_model_len, self.block_size = shard.max_model_len, shard.block_size
        self.free_tokens = shard.free_tokens
        self.sampler = Sampler(self.model_config.vocab_size, self.device)
        self._sampled: torch.Tensor | None = None  # what the last started step samples, on the device
        self._mask_builder: MaskBuilder | None = None
        try:
            with_tokenizer = config.stop_at_tokenizer_eos and not config.skip_tokenizer_init
            self.generation_defaults = GenerationDefaults.load(
                config.model, shard.hf_config, with_tokenizer=with_tokenizer
            )
            self.pools = self._allocate_cache()
            self._snapshot_interval = 0
            if config.enable_prefix_caching:
                interval = config.state_snapshot_interval
                self._snapshot_interval = shard.page_sizes.snapshot_interval(self.pools, interval)
            self.draft_model = self._new_draft_model()
            self._planner = StepPlanner(
                self.block_size,
                *worker.block_tables.shape,
                page_maps=[HostPageMap(self.pools.num_blocks) for _ in self.pools.num_window_pages],
                has_states=self.pools.num_slots > 0,
            )
        except BaseException:
            self.close()
            raise
        self._log_capacity()

    @property
    def info(self) -> EngineInfo:
        """The model and the sizes that the engine schedules for."""
        return EngineInfo(
            model=self.config.model,
            block_size=self.block_size,
            num_blocks=self.pools.num_blocks,
            num_host_blocks=self.pools.num_host_blocks,
            max_model_len=self.max_model_len,
            vocab_size=self.model_config.vocab_size,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            attention_backend=self.backend.name,
            eos_token_ids=self.generation_defaults.eos_token_ids,
            default_sampling=self.generation_defaults.sampling,
            max_logprobs=self.config.max_logprobs,
            free_tokens=self.free_tokens,
            windows=tuple(zip(self.workers.local.kv_cache.windows, self.pools.num_window_pages, strict=True)),
            num_slots=self.pools.num_slots,
            num_snapshots=self.pools.num_snapshots,
            snapshot_interval=self._snapshot_interval,
            num_host_window_pages=self.pools.num_host_window_pages,
            num_host_slots=self.pools.num_host_slots,
            kv_cache_dtype=self.workers.local.shard.kv_cache_dtype,
        )

    @property
    def host_memory(self) -> HostMemory | None:
        """The bytes of the host pools; None if each of several ranks has a pool of its own."""
        has_all = self.config.tensor_parallel_size == 1 or self._shares_host_pools
        return self.workers.local.kv_cache.host_memory if has_all else None

    @property
    def _shares_host_pools(self) -> bool:
        """Whether all ranks have one host pool, because a tier beyond it reads and writes whole pages."""
        return self.config.tensor_parallel_size > 1 and bool(self.config.shared_memory_options)

    def run(self, output: SchedulerOutput, times: StepTimes) -> SampledTokens:
        """Compute the batch and sample for each of ``output.sampling``; the phases' seconds go to ``times``.

        Raises:
            EngineDeadError: if a rank has died; no later step can run.
        """
        return self._start(output).finish(times)

    def start(self, output: SchedulerOutput) -> _StepInFlight:
        """Queue the batch on the device, and the sampling for each of ``output.sampling``; a CPU computes them now.

        The tokens of the batch may be pending: those that the step started before this one samples.

        Raises:
            EngineDeadError: if a rank has died; no later step can run.
        """
        return self._start(output, keep_logits=self.device.type == "cpu")

    @torch.inference_mode()
    def _start(self, output: SchedulerOutput, *, keep_logits: bool = False) -> _StepInFlight:
        """Begin a step. Its logits are valid until the next one begins, or until it is finished if they are kept."""
        try:
            return self._queue(output, keep_logits)
        except BaseException:  # an interrupted offline engine may continue
            self._planner.forget_ranks()
            raise

    def _queue(self, output: SchedulerOutput, keep_logits: bool) -> _StepInFlight:
        timer = StepTimer(self.device)
        positions = output.sampling
        if output.drafts:
            positions = list(chain(positions, *output.continuations.values()))
        constrained = [index for index, sequence in enumerate(positions) if sequence.grammar is not None]
        masks = self._start_masks([positions[index].grammar for index in constrained]) if constrained else None
        plan = self._planner.plan(output)
        if isinstance(self.draft_model, GpuDraftModel):
            self.draft_model.follow(output.block_copies)
        prompts = _PromptLogprobs(self.sampler, output, self.device) if len(plan.prompt_logit_indices) else None
        logits = self.workers.execute(plan, None if prompts is None else prompts.add, self._sampled)
        timer.forward_queued()
        pending = self._sampled = None
        if logits is not None:
            logits = logits.clone() if keep_logits else logits
            grammar = (constrained, masks.result()) if masks is not None else None
            pending = _PendingSample(self.sampler.start(logits, positions, grammar), output.drafts)
            self._sampled = pending.on_device
        timer.step_queued()
        return _StepInFlight(self.workers, timer, pending, prompts)

    def _start_masks(self, grammars: list[Any]) -> Future[torch.Tensor]:
        """Start to compute the masks of the next tokens, in parallel with the forward pass."""
        if self._mask_builder is None:
            from engine.structured_outputs.bitmask import MaskBuilder  # only where grammars are used

            self._mask_builder = MaskBuilder(self.device)
        return self._mask_builder.start(grammars)

    def check_health(self) -> None:
        """Raise EngineDeadError if a rank has died, even if no step has noticed yet."""
        self.workers.check_health()

    def close(self) -> None:
        """End the processes of the other ranks. No step can run afterwards."""
        self.workers.close()
        if self._mask_builder is not None:
            self._mask_builder.close()

    def _allocate_cache(self) -> PoolSizes:
        """Warm up, then allocate the KV cache, as large as fits on every rank; return the sizes of its pools."""
        self.workers.call("warm_up", self.workers.local.shard.warm_up_batches())
        page_sizes = self.workers.local.shard.page_sizes
        if self.config.num_blocks is not None:
            pools = pools_of_blocks(self.config, page_sizes)
        else:
            pools = smallest(self.workers.call("measure_pools"))
        if pools.num_blocks * self.block_size < 2:
            raise ConfigError("num_blocks=1 of block_size=1 holds no prompt with an answer; raise one of them")
        most_running = min(self.config.max_num_seqs, self.config.tokens_per_step)
        pools = replace(pools, num_snapshots=max(pools.num_snapshots, pools.num_slots - most_running))
        on_gpu = self.device.type != "cpu"
        pools = host_pools_for(self.config, pools, page_sizes, self.max_model_len, is_on_gpu=on_gpu)
        if self._shares_host_pools and pools.num_host_blocks:
            with host_shares(len(pools.num_window_pages) + 2, self.config.tensor_parallel_size) as shares:
                self.workers.call("allocate", pools, shares)
        else:
            self.workers.call("allocate", pools)
        self.workers.call("capture_graphs")
        return pools

    def _new_draft_model(self) -> CpuDraftModel | GpuDraftModel | None:
        worker, draft = self.workers.local, self.workers.local.shard.draft
        weight_bytes, max_pass_tokens = worker.shard.weight_bytes, self.config.tokens_per_step
        if (head := worker.shard.draft_head) is not None:
            return CpuHiddenStateModel(
                head, worker.kv_cache, weight_bytes=weight_bytes, max_pass_tokens=max_pass_tokens
            )
        if draft is None:
            return None
        if worker.draft_passes is None:
            return CpuDraftModel(draft, worker.kv_cache, weight_bytes=weight_bytes, max_pass_tokens=max_pass_tokens)
        return GpuDraftModel(
            draft,
            worker.draft_passes,
            HostPrefixMarks(self.pools.num_blocks, self.pools.num_host_blocks, self.block_size),
            self.block_size,
            self.device,
            weight_bytes=weight_bytes,
            max_pass_tokens=max_pass_tokens,
        )

    def _log_capacity(self) -> None:
        cache, ranks = self.workers.local.kv_cache, self.config.tensor_parallel_size
        size, tokens = cache.num_bytes * ranks / 2**30, cache.num_tokens
        kind = "CPU" if self.device.type == "cpu" else "GPU"
        if cache.blocks.parts:
            shard = self.workers.local.shard
            dtype = self.info.dtype if shard.kv_cache_dtype == "auto" else shard.kv_cache_dtype
            logger.info(
                "%s KV cache size: %s tokens in %s, %d blocks of %d in %.2f GiB",
                kind,
                f"{tokens:,}",
                dtype,
                self.pools.num_blocks,
                self.block_size,
                size,
            )
        else:
            logger.info("%s KV cache size: %.2f GiB; no layer attends to everything", kind, size)
        for window, pages in cache.windows.items():
            in_gib = pages.num_bytes * ranks / 2**30
            kind = "chunks" if isinstance(window, Chunk) else "a window"
            tokens_seen = f"{most_keys(window):,}"
            logger.info("Layers with %s of %s tokens: %d pages in %.2f GiB", kind, tokens_seen, pages.num_pages, in_gib)
        if self.pools.num_slots:
            logger.info(
                "Recurrent layers: %d states of %.2f MiB, %d of them for snapshots",
                self.pools.num_slots,
                cache.slots.bytes_per_page * ranks / 2**20,
                self.pools.num_snapshots,
            )
        if self._snapshot_interval:
            logger.info("Recurrent layers: a snapshot every %s tokens of a prefill", f"{self._snapshot_interval:,}")
        if self.pools.num_host_blocks:
            in_gib = sum(pool.num_host_bytes for pool in cache.pools) * ranks / 2**30
            num_pages = sum(self.pools.num_host_window_pages)
            logger.info(
                "Host memory for preempted requests and evicted prefixes: %d blocks, %d pages of windows and %d states "
                "in %.2f GiB",
                self.pools.num_host_blocks,
                num_pages,
                self.pools.num_host_slots,
                in_gib,
            )
        if not cache.blocks.parts:
            return
        length = self.max_model_len
        logger.info("Maximum concurrency for %s tokens per request: %.2fx", f"{length:,}", tokens / length)
        if tokens < length:
            logger.warning(
                "The KV cache is smaller than the context of %d tokens: a prompt and its answer have at most %d. "
                "Raise kv_cache_memory, or lower max_model_len.",
                length,
                tokens,
            )


class _StepInFlight:
    """A step that is queued on the device.

    Args:
        workers: the workers, which may have been given further steps.
        timer: clocks the step.
        pending: what is sampled; None if the step samples nothing.
        prompts: log-probabilities of prompt tokens; None if none are wanted.
    """

    def __init__(
        self, workers: WorkerPool, timer: StepTimer, pending: _PendingSample | None, prompts: _PromptLogprobs | None
    ) -> None:
        self._workers = workers
        self._timer = timer
        self._pending = pending
        self._prompts = prompts

    def finish(self, times: StepTimes) -> SampledTokens:
        """Wait for the step, and return what it has sampled; the phases' seconds go to ``times``.

        Raises:
            EngineDeadError: if a rank has died; no later step can run.
        """
        # The only wait of a step. One that samples nothing waits too, else its time would be counted in the next step.
        self._workers.wait(self._timer.end)
        self._timer.step_done()
        sampled = SampledTokens([]) if self._pending is None else self._pending.finish(self._workers.wait)
        if self._prompts is not None:
            sampled.prompt_logprobs = self._prompts.by_group()
        self._timer.stop(times)
        return sampled


class _PendingSample:
    """What one step samples, after its draft tokens too, while the device computes it.

    Args:
        tokens: of the sequences that sample, then after each draft token.
        drafts: of the step.
    """

    def __init__(self, tokens: PendingTokens, drafts: Mapping[Sequence, list[int]]) -> None:
        self._tokens = tokens
        self._drafts = drafts
        self.on_device = tokens.on_device  # int64 [num_sampled + num_draft_tokens]

    def finish(self, wait: Callable[[], None]) -> SampledTokens:
        """Return what was sampled; the device must be done. See ``PendingTokens.finish``."""
        sampled = self._tokens.finish(wait)
        if self._drafts:
            sampled.take_after_drafts(self._drafts)
        return sampled


class _PromptLogprobs:
    """Collects one step's log-probabilities of prompt tokens, slice by slice."""

    def __init__(self, sampler: Sampler, output: SchedulerOutput, device: torch.device) -> None:
        self._sampler = sampler
        self._groups: list[tuple[SequenceGroup, int]] = []  # and how many logits belong to it, in batch order
        token_ids: list[int] = []
        self._num_top_tokens: list[int] = []  # for each logit index: how many of the most likely tokens are wanted
        self._pending: list[PendingLogprobs] = []
        self._num_pending = 0  # logit indices in them
        for sequence, count in zip(output.sequences, output.num_new_tokens, strict=True):
            group, start = sequence.group, sequence.num_computed_tokens
            if positions := group.prompt_logprob_positions(start, start + count):
                self._groups.append((group, len(positions)))
                token_ids += sequence.token_ids[positions.start + 1 : positions.stop + 1]
                self._num_top_tokens += [group.params.prompt_logprobs or 0] * len(positions)
        self._token_ids = to_device(token_ids, torch.int64, device)  # for each logit index: the prompt's next token

    def add(self, logits: torch.Tensor) -> None:
        """Add the next slice of logits, [n, vocab_size]."""
        part = slice(self._num_pending, self._num_pending + len(logits))
        self._pending.append(self._sampler.prompt_logprobs(logits, self._token_ids[part], self._num_top_tokens[part]))
        self._num_pending = part.stop

    def by_group(self) -> list[tuple[SequenceGroup, list[TokenLogprobs]]]:
        """Return each request's log-probabilities; all slices must have been added, and the device be done."""
        logprobs = chain.from_iterable(pending.to_lists() for pending in self._pending)
        return [(group, list(islice(logprobs, count))) for group, count in self._groups]
