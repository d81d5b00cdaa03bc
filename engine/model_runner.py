"""ModelRunner: computes one scheduled batch with all ranks, and samples from its logits.

It turns a SchedulerOutput into a plan, has the workers execute it, and samples on rank 0. It decides nothing: which
tokens are computed and where their keys and values go is the scheduler's and the block manager's business.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from engine.batch import build_step_plan
from engine.config import EngineConfig
from engine.distributed.worker_pool import WorkerPool
from engine.errors import ConfigError
from engine.logprobs import TokenLogprobs
from engine.memory import host_blocks_for
from engine.metrics import StepTimes
from engine.models.config import GenerationDefaults
from engine.sampler import Sampler
from engine.sequence import SequenceGroup
from engine.step import SampledTokens, SchedulerOutput

if TYPE_CHECKING:
    from engine.structured_outputs.bitmask import MaskBuilder

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
        self.sampler = Sampler(self.model_config.vocab_size, self.device)
        self._mask_builder: MaskBuilder | None = None
        try:
            self.generation_defaults = GenerationDefaults.load(config.model, worker.hf_config)
            self.num_blocks = self._allocate_blocks()
        except BaseException:
            self.close()
            raise
        self._log_capacity()

    @torch.inference_mode()
    def run(self, output: SchedulerOutput, times: StepTimes) -> SampledTokens:
        """Compute the batch and sample for each of ``output.sampling``; the phases' seconds go to ``times``.

        Raises:
            EngineDeadError: if a rank has died; no later step can run.
        """
        started = perf_counter()
        constrained = [row for row, sequence in enumerate(output.sampling) if sequence.grammar is not None]
        masks = self._start_masks([output.sampling[row].grammar for row in constrained]) if constrained else None
        logits = self.workers.execute(build_step_plan(output, self.block_size))
        times.forward = perf_counter() - started
        sampled = SampledTokens([])
        if logits is not None:
            num_sampled = len(output.sampling)
            prompt_logits = logits[num_sampled:]  # cut first: sampling alters its rows
            prompt_logprobs = self._prompt_logprobs(output, prompt_logits) if len(prompt_logits) else []
            grammar = (constrained, masks.result()) if masks is not None else None
            sampled = self.sampler.sample(logits[:num_sampled], output.sampling, grammar)
            sampled.prompt_logprobs = prompt_logprobs
        times.sample = perf_counter() - started - times.forward
        return sampled

    def _start_masks(self, grammars: list[Any]) -> Future[torch.Tensor]:
        """Compute the masks of the next tokens beside the forward pass."""
        if self._mask_builder is None:
            from engine.structured_outputs.bitmask import MaskBuilder  # only where grammars are used

            self._mask_builder = MaskBuilder()
        return self._mask_builder.start(grammars)

    def _prompt_logprobs(
        self, output: SchedulerOutput, logits: torch.Tensor
    ) -> list[tuple[SequenceGroup, list[TokenLogprobs]]]:
        """Return what the step tells of prompts whose logprobs are wanted; ``logits`` are those rows in batch order."""
        found = []
        row = 0
        for sequence, count in zip(output.sequences, output.num_new_tokens, strict=True):
            start = sequence.num_computed_tokens
            if known := sequence.group.prompt_logprob_positions(start, start + count):
                token_ids = [sequence.token_ids[position + 1] for position in known]
                num_top = sequence.params.prompt_logprobs or 0
                logprobs = self.sampler.prompt_logprobs(logits[row : row + len(known)], token_ids, num_top)
                found.append((sequence.group, logprobs))
                row += len(known)
        return found

    def check_health(self) -> None:
        """Raise EngineDeadError if a rank has died, even if no step has noticed yet."""
        self.workers.check_health()

    def close(self) -> None:
        """End the other ranks; nothing can run afterwards."""
        self.workers.close()
        if self._mask_builder is not None:
            self._mask_builder.close()

    def _allocate_blocks(self) -> int:
        """Make the KV cache on every rank, in the size that the tightest one can hold; returns the number of blocks."""
        num_blocks = self.config.num_blocks or min(self.workers.call("measure_num_blocks"))
        if num_blocks * self.block_size < 2:
            raise ConfigError("num_blocks=1 of block_size=1 holds no prompt with an answer; raise one of them")
        bytes_per_block = self.workers.local.bytes_per_block * self.config.tensor_parallel_size
        self.num_host_blocks = host_blocks_for(self.config.swap_space_gib, bytes_per_block)
        self.workers.call("allocate", num_blocks, self.num_host_blocks)
        return num_blocks

    def _log_capacity(self) -> None:
        tokens = self.num_blocks * self.block_size
        size = self.workers.local.kv_cache.num_bytes * self.config.tensor_parallel_size
        logger.info(
            "KV cache: %d blocks of %d tokens, %d tokens in %.2f GiB; room for %.2f requests of %d tokens",
            self.num_blocks, self.block_size, tokens, size / 2**30, tokens / self.max_model_len, self.max_model_len,
        )  # fmt: skip
