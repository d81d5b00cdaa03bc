"""The parts that an engine is made of, from its options and from the sizes of the loaded model."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.config import EngineConfig, EngineInfo
from engine.errors import ConfigError
from engine.kv.block_manager import BlockManager
from engine.kv.pool_sizes import pages_in_reach
from engine.kv.tiers.tiers import Tiers
from engine.observability.metrics import MetricSink
from engine.request import RequestValidator
from engine.scheduling.drafting.configured import new_drafter
from engine.scheduling.drafting.draft_model import DraftModel
from engine.scheduling.prefill_pace import PrefillPace
from engine.scheduling.scheduler import Scheduler
from engine.worker.runner import Runner

__all__ = ["new_block_manager", "new_scheduler", "new_tiers", "new_validator", "overlaps_steps"]

logger = logging.getLogger(__name__)


def overlaps_steps(config: EngineConfig, info: EngineInfo) -> bool:
    """Whether a step is scheduled while the one before is computed. On a CPU both would take the same cores."""
    if config.async_scheduling is None:
        return info.device != "cpu" and config.tensor_parallel_size == 1
    if config.async_scheduling and config.tensor_parallel_size > 1:
        logger.warning(
            "async_scheduling is off with tensor_parallel_size=%d: the other ranks do not have the sampled tokens",
            config.tensor_parallel_size,
        )
        return False
    return config.async_scheduling


def new_block_manager(config: EngineConfig, info: EngineInfo, *, record_events: bool) -> BlockManager:
    return BlockManager(
        info.num_blocks,
        info.block_size,
        num_host_blocks=info.num_host_blocks,
        windows=info.windows,
        num_slots=info.num_slots,
        num_snapshots=info.num_snapshots,
        snapshot_interval=info.snapshot_interval,
        num_host_window_pages=info.num_host_window_pages,
        num_host_slots=info.num_host_slots,
        enable_prefix_caching=config.enable_prefix_caching,
        record_events=record_events,
    )


def new_scheduler(
    config: EngineConfig, info: EngineInfo, block_manager: BlockManager, draft_model: DraftModel | None = None
) -> Scheduler:
    pace = drafter = None
    if config.max_decode_slowdown is not None and info.free_tokens is not None:
        target = config.target_inter_token_ms
        target_s = None if target is None else target / 1e3
        pace = PrefillPace(info.free_tokens, config.max_decode_slowdown, target_s)
    if config.speculation is not None:
        drafter = new_drafter(config, config.speculation, info, block_manager, draft_model)
    return Scheduler(
        block_manager,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.tokens_per_step,
        long_prefill_threshold=config.long_prefill_threshold,
        pace=pace,
        drafter=drafter,
    )


def new_validator(config: EngineConfig, info: EngineInfo, scheduler: Scheduler) -> RequestValidator:
    """Return the rules for requests."""
    return RequestValidator(
        model=info.model,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_logprobs=info.max_logprobs,
        max_num_seqs=scheduler.max_num_running,
        shares_prefixes=config.enable_prefix_caching,
        windows=tuple((pages_in_reach(window, info.block_size), pages) for window, pages in info.windows),
        step_pages=-(-config.tokens_per_step // info.block_size),
    )


def new_tiers(
    config: EngineConfig,
    runner: Runner,
    blocks: BlockManager,
    scheduler: Scheduler,
    prefill_rate: Callable[[], float],
    sink: MetricSink | None,
    on_changed: Callable[[], None],
) -> Tiers | None:
    """Return the tiers; None if there is no host pool, through which all pages pass, or each rank has its own.

    Raises:
        ConfigError: if the options ask for a tier that cannot be.
    """
    info = runner.info
    memory = runner.host_memory if info.num_host_blocks and config.enable_prefix_caching else None
    if memory is not None:
        return Tiers(config, info, blocks, scheduler, memory, prefill_rate, sink, on_changed)
    for name, value in config.shared_memory_options.items():
        off = "false" if value is True else "null"
        raise ConfigError(
            "needs a host pool and the prefix cache",
            param=name,
            value=value,
            remedy=f"set swap_space_gib and enable_prefix_caching, or set it {off}",
        )
    return None
