"""WarmUp: computes steps before the KV cache is allocated, so that kernels are compiled and memory is measured."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from engine.kv.kv_cache import KVCache
from engine.models.config.model_config import ModelConfig
from engine.models.config.model_shape import ModelShape
from engine.models.decoder.expanded_latents import longest_expanded
from engine.sampling.sampler import Sampler
from engine.sampling.token_rows import bytes_of_histories
from engine.worker.drafting.draft_decoder import DraftDecoder
from engine.worker.model_shard import PROMPT_LOGITS_AT_ONCE, ModelShard
from engine.worker.step_plan import ModelInput
from engine.worker.warm_up_steps import largest_step, one_sequence
from kernels.cache.pending_tokens import take_pending_tokens

__all__ = ["WarmUp"]


class WarmUp:
    """The warm-up of one rank.

    Args:
        shard: the rank's model, loaded.
    """

    def __init__(self, shard: ModelShard) -> None:
        self._shard = shard

    def run_batches(self, batches: list[tuple[int, int]]) -> None:
        """Run batches of one sequence, given as (query_len, seq_len), so that their kernels are compiled."""
        shard = self._shard
        if batches:
            cache = shard.make_cache()
            for query_len, seq_len in batches:
                step = one_sequence(query_len, seq_len, block_size=shard.block_size, device=shard.device)
                shard.forward(_with_windows(step, cache), cache)
        if (draft := shard.draft) is not None and shard.device.type == "cuda":
            part = draft.part_of(shard.make_cache())
            for query_len, seq_len in draft.warm_up_batches(shard.config.tokens_per_step):
                step = one_sequence(query_len, seq_len, block_size=shard.block_size, device=shard.device)
                draft.forward(step, part)

    def run_largest_step(self) -> None:
        """Run and sample the largest step once, so that torch records the peak of memory that it takes.

        The histories of sequences with penalties outlive a step: their memory is taken meanwhile.
        """
        shard = self._shard
        model_input = largest_step(
            shard.config,
            max_model_len=shard.max_model_len,
            block_size=shard.block_size,
            num_prompt_logits=PROMPT_LOGITS_AT_ONCE,
            device=shard.device,
        )
        sampler = Sampler(shard.model_config.vocab_size, shard.device)

        torch.cuda.reset_peak_memory_stats(shard.device)
        histories = self._memory_of_histories(len(model_input.logit_indices))
        cache = shard.make_cache()
        if (step := self._largest_expansion(shard.model_config, shard.max_model_len)) is not None:
            shard.forward(_with_windows(step, cache), cache)
        hidden = shard.forward(_with_windows(model_input, cache), cache)
        compute_logprobs = partial(sampler.warm_up_prompt_logprobs, max_logprobs=shard.config.max_logprobs)
        shard.compute_prompt_logits(hidden, model_input.prompt_logit_indices, compute_logprobs)
        if (logits := shard.model.compute_logits(hidden, model_input.logit_indices)) is not None:
            sampler.warm_up_kernels(logits)
            num_sampled = len(logits)  # after draft tokens too
            del logits
            sampler.warm_up(num_sampled, shard.config.max_logprobs)
        del hidden
        if shard.draft is not None:
            self._run_largest_pass(shard.draft)
        del histories
        token_ids = torch.full((1,), -1, device=shard.device)
        state_slots = token_ids.int() if shard.page_sizes.slot else None
        take_pending_tokens(token_ids, torch.zeros_like(token_ids), state_slots)

    def _largest_expansion(self, model_config: ModelShape, max_model_len: int) -> ModelInput | None:
        """Return the largest step of a model with its latents expanded; None for models without latents."""
        shard = self._shard
        if not isinstance(model_config, ModelConfig) or model_config.latent is None:
            return None
        longest = longest_expanded(model_config.latent, shard.block_size, shard.dtype.itemsize)
        return largest_step(
            shard.config,
            max_model_len=min(max_model_len, longest),
            block_size=shard.block_size,
            num_prompt_logits=0,
            device=shard.device,
            expands_latents=True,
        )

    def _memory_of_histories(self, num_sampled: int) -> torch.Tensor:
        """Return memory as large as the histories of the sequences that sample; rank 0 has them."""
        num_sequences = min(self._shard.config.max_num_seqs, num_sampled) if self._shard.rank == 0 else 0
        num_bytes = bytes_of_histories(num_sequences, self._shard.model_config.vocab_size)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._shard.device)

    def _run_largest_pass(self, draft: DraftDecoder) -> None:
        """Run and sample the largest pass of the draft model, whose peak of memory may be higher."""
        shard = self._shard
        model_input = largest_step(
            replace(shard.config, speculative_config=None),
            max_model_len=draft.max_len,
            block_size=shard.block_size,
            num_prompt_logits=0,
            device=shard.device,
        )
        part = draft.part_of(shard.make_cache())
        if (step := self._largest_expansion(draft.shape, draft.max_len)) is not None:
            draft.forward(step, part)
        hidden = draft.forward(model_input, part)
        logits = draft.model.compute_logits(hidden, model_input.logit_indices)
        assert logits is not None
        Sampler(draft.shape.vocab_size, shard.device).warm_up_kernels(logits)


def _with_windows(step: ModelInput, cache: KVCache) -> ModelInput:
    """Return the step for a cache with pages of windows, of which it uses the same as of blocks: the first."""
    return replace(step, windows=(step.metadata,) * len(cache.windows))
