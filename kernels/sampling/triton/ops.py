"""TritonSampling: logits changed and tokens chosen by Triton kernels: each logit is read once or twice to choose.

Every launch parameter follows from shapes. Those that compile follow from the size of the vocabulary alone, so the
warm-up compiles what all steps launch.
"""

from __future__ import annotations

import torch
import triton

from kernels.sampling.base import Limits, SamplingOps
from kernels.sampling.exact_math import TOKENS_OF_PART
from kernels.sampling.triton.filters import bitmask_kernel, change_tokens_kernel, penalise_kernel
from kernels.sampling.triton.kernels import best_of_parts_kernel, best_of_tokens_kernel
from kernels.sampling.triton.truncation import group_maxima_kernel, truncated_draw_kernel

__all__ = ["TritonSampling"]

_BLOCK = 2048  # tokens of a program: 75 programs for one row of 151,936
_GROUP = 64  # tokens whose largest logit is kept
_PAIRS = 128  # logits of a program that changes listed ones
_WORDS = 64  # of a bitmask: 32 tokens each
_TILE = 2048  # tokens that truncated_draw_kernel holds at once; with 4096 registers are spilled


class TritonSampling(SamplingOps):
    """Sampling on a GPU, or in Triton's interpreter."""

    def add_biases(
        self, logits: torch.Tensor, indices: torch.Tensor, token_ids: torch.Tensor, biases: torch.Tensor
    ) -> None:
        _change_tokens(logits, indices, token_ids, biases=biases)

    def forbid_tokens(
        self, logits: torch.Tensor, indices: torch.Tensor, token_ids: torch.Tensor, missing: torch.Tensor
    ) -> None:
        _change_tokens(logits, indices, token_ids, missing=missing)

    def forbid_words(
        self,
        logits: torch.Tensor,
        indices: torch.Tensor,
        token_ids: torch.Tensor,
        words: torch.Tensor,
        owners: torch.Tensor,
        tails: torch.Tensor,
    ) -> None:
        _change_tokens(logits, indices, token_ids, words=words, owners=owners, tails=tails)

    def penalise_repetition(
        self, logits: torch.Tensor, indices: torch.Tensor, seen: torch.Tensor, penalties: torch.Tensor
    ) -> None:
        _penalise(logits, indices, seen.view(torch.uint8), penalties, None, None)

    def penalise_counts(
        self,
        logits: torch.Tensor,
        indices: torch.Tensor,
        counts: torch.Tensor,
        frequency: torch.Tensor,
        presence: torch.Tensor,
    ) -> None:
        _penalise(logits, indices, counts, None, frequency, presence)

    def apply_bitmask(self, logits: torch.Tensor, indices: torch.Tensor | None, bitmask: torch.Tensor) -> None:
        assert logits.stride(1) == 1
        assert bitmask.is_contiguous()
        num_rows, num_words = bitmask.shape
        if num_rows == 0:
            return
        bitmask_kernel[num_rows, triton.cdiv(num_words, _WORDS)](
            logits,
            indices,
            bitmask,
            logits.shape[1],
            num_words,
            logits.stride(0),
            WORDS=_WORDS,
            enable_fp_fusion=False,
        )

    def argmax(self, tokens: torch.Tensor, logits: torch.Tensor, indices: torch.Tensor | None) -> None:
        _choose(tokens, logits, indices, None, None)

    def draw(
        self,
        tokens: torch.Tensor,
        logits: torch.Tensor,
        indices: torch.Tensor | None,
        temperatures: torch.Tensor,
        keys: torch.Tensor,
    ) -> None:
        assert temperatures.is_contiguous()
        assert keys.is_contiguous()
        _choose(tokens, logits, indices, temperatures, keys)

    def truncated_draw(
        self,
        tokens: torch.Tensor,
        logits: torch.Tensor,
        indices: torch.Tensor | None,
        temperatures: torch.Tensor,
        keys: torch.Tensor,
        limits: Limits,
    ) -> None:
        columns = (temperatures, keys, limits.top_k, limits.top_p, limits.floors)
        assert all(tensor.is_contiguous() for tensor in (tokens, *columns))
        assert logits.stride(1) == 1
        num_rows, vocab_size = len(temperatures), logits.shape[1]
        if num_rows == 0:
            return
        num_groups, num_parts = triton.cdiv(vocab_size, _GROUP), triton.cdiv(vocab_size, TOKENS_OF_PART)
        maxima = torch.empty(num_rows, num_groups, dtype=torch.int32, device=logits.device)
        parts = torch.empty(num_rows, 2, num_parts, dtype=torch.int64, device=logits.device)
        shape = (vocab_size, logits.stride(0), num_groups)
        group_maxima_kernel[num_rows, num_parts](
            maxima,
            parts,
            logits,
            indices,
            temperatures,
            limits.top_k,
            limits.top_p,
            *shape,
            GROUP=_GROUP,
            GROUPS=TOKENS_OF_PART // _GROUP,
            enable_fp_fusion=False,
        )
        truncated_draw_kernel[(num_rows,)](
            tokens,
            logits,
            indices,
            *columns,
            maxima,
            parts,
            torch.empty(num_rows, 2, vocab_size, dtype=torch.int32, device=logits.device),
            *shape,
            num_parts,
            GROUP=_GROUP,
            GROUPS_PADDED=triton.next_power_of_2(num_groups),
            PARTS_PADDED=triton.next_power_of_2(num_parts),
            TILE=_TILE,
            num_warps=16,
            maxnreg=128,  # else ptxas spills some to fit two programs on a multiprocessor
            enable_fp_fusion=False,
        )

    def warm_up(self, logits: torch.Tensor) -> None:
        device = logits.device
        temperatures, keys = torch.ones(1, 1, device=device), torch.ones(1, 2, dtype=torch.int32, device=device)
        indices = torch.zeros(1, dtype=torch.int64, device=device)
        limits = Limits(torch.ones_like(indices)[:, None], temperatures, torch.zeros_like(temperatures))
        for row in (logits[:1], logits[1:2]):  # they may be aligned differently, as parts of a step's logits are
            self._warm_up_changes(row)
            for rows in (None, indices[: len(row)]):
                tokens = torch.empty(len(row), dtype=torch.int64, device=device)
                self.argmax(tokens, row, rows)
                self.draw(tokens, row, rows, temperatures[: len(row)], keys[: len(row)])
                self.truncated_draw(tokens, row, rows, temperatures[: len(row)], keys[: len(row)], limits)

    def _warm_up_changes(self, logits: torch.Tensor) -> None:
        """Compile what changes one row of logits."""
        device, (num_rows, vocab_size) = logits.device, logits.shape
        pairs = torch.zeros(num_rows, dtype=torch.int64, device=device)
        words, factors = torch.zeros_like(pairs)[:, None], torch.ones(num_rows, 1, device=device)
        history = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        bitmask = torch.zeros(num_rows, triton.cdiv(vocab_size, 32), dtype=torch.int32, device=device)
        self.add_biases(logits, pairs, pairs, factors)
        self.forbid_tokens(logits, pairs, pairs, pairs)
        self.forbid_words(logits, pairs, pairs, words, pairs, words)
        self.penalise_repetition(logits, pairs, history.bool(), factors)
        self.penalise_counts(logits, pairs, history, factors, factors)
        self.apply_bitmask(logits, None, bitmask)
        self.apply_bitmask(logits, pairs, bitmask)


def _change_tokens(
    logits: torch.Tensor,
    indices: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    biases: torch.Tensor | None = None,
    missing: torch.Tensor | None = None,
    words: torch.Tensor | None = None,
    owners: torch.Tensor | None = None,
    tails: torch.Tensor | None = None,
) -> None:
    lists = (indices, token_ids, biases, missing, words, owners, tails)
    assert logits.stride(1) == 1
    assert all(tensor is None or tensor.is_contiguous() for tensor in lists)
    num_pairs, width = len(indices), 0 if words is None else words.shape[1]
    if num_pairs:
        grid = (triton.cdiv(num_pairs, _PAIRS),)
        change_tokens_kernel[grid](
            logits, *lists, num_pairs, width, logits.stride(0), BLOCK=_PAIRS, enable_fp_fusion=False
        )


def _penalise(
    logits: torch.Tensor,
    indices: torch.Tensor,
    history: torch.Tensor,
    repetition: torch.Tensor | None,
    frequency: torch.Tensor | None,
    presence: torch.Tensor | None,
) -> None:
    assert logits.stride(1) == 1
    assert history.is_contiguous()
    num_rows, vocab_size = history.shape
    if num_rows:
        penalise_kernel[num_rows, triton.cdiv(vocab_size, _BLOCK)](
            logits,
            indices,
            history,
            repetition,
            frequency,
            presence,
            vocab_size,
            logits.stride(0),
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )


def _choose(
    tokens: torch.Tensor,
    logits: torch.Tensor,
    indices: torch.Tensor | None,
    temperatures: torch.Tensor | None,
    keys: torch.Tensor | None,
) -> None:
    assert logits.stride(1) == 1
    assert tokens.is_contiguous()
    num_rows, vocab_size = len(logits) if indices is None else len(indices), logits.shape[1]
    if num_rows == 0:
        return
    num_parts = triton.cdiv(vocab_size, _BLOCK)
    parts = torch.empty(num_rows, num_parts, dtype=torch.int64, device=logits.device)
    best_of_tokens_kernel[num_rows, num_parts](
        parts,
        logits,
        indices,
        temperatures,
        keys,
        vocab_size,
        logits.stride(0),
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
    best_of_parts_kernel[(num_rows,)](
        tokens, parts, indices, num_parts, PARTS_PADDED=triton.next_power_of_2(num_parts), enable_fp_fusion=False
    )
