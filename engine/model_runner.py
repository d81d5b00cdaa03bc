"""ModelRunner: computes one scheduled batch with all ranks, and samples from its logits.

It turns a SchedulerOutput into a plan, has the workers execute it, and samples on rank 0. It decides nothing: which
tokens are computed and where their keys and values go is the scheduler's and the block manager's business.
"""

from __future__ import annotations

import logging
from time import perf_counter

import torch

from engine.batch import build_step_plan
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.metrics import StepTimes
from engine.models.config import GenerationDefaults
from engine.sampler import SamplingBatch, sample
from engine.scheduler import SchedulerOutput
from engine.worker_pool import WorkerPool

__all__ = ["ModelRunner"]

logger = logging.getLogger(__name__)


class ModelRunner:
    """One model with its KV cache, on one device or on several ranks.

    Raises:
        ConfigError: if an option does not fit the model, the backend or the machine.
        ModelLoadError: if the checkpoint cannot be served.
        EngineDeadError: if a rank dies while it loads.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        started = perf_counter()
        self.workers = WorkerPool(config)
        logger.info("Loading weights took %.2f seconds", perf_counter() - started)
        worker = self.workers.local
        self.device, self.dtype, self.backend = worker.device, worker.dtype, worker.backend
        self.model_config = worker.model_config
        self.max_model_len, self.block_size = worker.max_model_len, worker.block_size
        try:
            self.generation_defaults = GenerationDefaults.load(config.model, worker.hf_config)
            self.num_blocks = self._allocate_blocks()
        except BaseException:
            self.close()
            raise
        self._log_capacity()

    @torch.inference_mode()
    def run(self, output: SchedulerOutput, times: StepTimes) -> list[int]:
        """Compute the batch and return a token for each of ``output.sampling``; the phases' seconds go to ``times``.

        Raises:
            EngineDeadError: if a rank has died; no later step can run.
        """
        started = perf_counter()
        logits = self.workers.execute(build_step_plan(output, self.block_size))
        times.forward = perf_counter() - started
        token_ids: list[int] = []
        if logits is not None:
            batch = SamplingBatch.build(output.sampling, self.model_config.vocab_size, self.device)
            token_ids = sample(logits, batch).tolist()
        times.sample = perf_counter() - started - times.forward
        return token_ids

    def close(self) -> None:
        """End the other ranks; nothing can run afterwards."""
        self.workers.close()

    def _allocate_blocks(self) -> int:
        """Make the KV cache on every rank, in the size that the tightest one can hold; returns the number of blocks."""
        num_blocks = self.config.num_blocks or min(self.workers.call("measure_num_blocks"))
        if num_blocks * self.block_size < 2:
            raise ConfigError("num_blocks=1 of block_size=1 holds no prompt with an answer; raise one of them")
        self.workers.call("allocate", num_blocks)
        return num_blocks

    def _log_capacity(self) -> None:
        tokens = self.num_blocks * self.block_size
        size = tokens * self.workers.local.kv_bytes_per_token * self.config.tensor_parallel_size
        logger.info(
            "KV cache: %d blocks of %d tokens, %d tokens in %.2f GiB; room for %.2f requests of %d tokens",
            self.num_blocks, self.block_size, tokens, size / 2**30, tokens / self.max_model_len, self.max_model_len,
        )  # fmt: skip
