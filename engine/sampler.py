"""Sampler: logits to tokens.

Sampling is a pure function of (logits, parameters, seed, position). It takes the likeliest token after adding Gumbel
noise to the logits (the Gumbel-max trick, Gumbel 1954), and the noise of token v is a hash of the row's seed, the
position of the token to come, and v. No generator has state, so the same seed gives the same tokens whatever else is in
the batch, after a preemption and on another replica. Another batch changes logits in their last bits; that changes a
draw only where two noisy logits are as close as that, whereas inverting a cumulative sum would move all its boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.sequence import Sequence

__all__ = ["SamplingBatch", "filter_logits", "gumbel_noise", "noise_keys", "sample"]


def noise_keys(seeds: Sequence_[int], positions: Sequence_[int]) -> npt.NDArray[np.int32]:
    """Return two 32-bit keys per (seed, position), int32 [rows, 2], by SplitMix64 (Steele et al., 2014)."""
    mask = 2**64 - 1
    with np.errstate(over="ignore"):
        z = np.array([seed & mask for seed in seeds], dtype=np.uint64)
        # Hash the seed before the position is added: seeds 1, 2, 3 at positions 3, 2, 1 must not meet.
        for step in (np.uint64(0), np.array(positions, dtype=np.uint64)):
            z = z + (step + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z = z ^ (z >> np.uint64(31))
    return z.view(np.int32).reshape(-1, 2)


def _as_int32(constant: int) -> int:
    return constant - 2**32 if constant >= 2**31 else constant


def gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return standard Gumbel noise, float32 [rows, vocab_size], from int32 ``keys`` [rows, 2].

    Each number comes from MurmurHash3's 32-bit finaliser, keyed before and within; products wrap.
    """
    x = torch.arange(vocab_size, dtype=torch.int32, device=keys.device).mul_(_as_int32(0x9E3779B1))
    x = x + keys[:, :1]
    x ^= (x >> 16) & 0xFFFF  # the mask makes the shift a logical one
    x *= _as_int32(0x85EBCA6B)
    x += keys[:, 1:]
    x ^= (x >> 13) & 0x7FFFF
    x *= _as_int32(0xC2B2AE35)
    x ^= (x >> 16) & 0xFFFF
    # 23 bits and a half: in float32 exactly, and never 0 or 1.
    uniform = ((x >> 9) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters of one step's rows, as columns; every tensor is [num_rows], on the logits' device."""

    all_greedy: bool
    temperature: torch.Tensor
    top_k: torch.Tensor  # vocab_size where off
    top_p: torch.Tensor  # infinite where off
    min_p: torch.Tensor
    keys: torch.Tensor  # int32 [num_rows, 2]: of the noise
    forbidden: tuple[tuple[int, tuple[int, ...]], ...]  # (row, ids that may not come yet)

    @classmethod
    def build(cls, sequences: Sequence_[Sequence], vocab_size: int, device: torch.device) -> SamplingBatch:
        """Collect the parameters of the sequences that sample in this step."""
        params = [sequence.params for sequence in sequences]

        def column(values: object, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)

        return cls(
            all_greedy=all(p.is_greedy for p in params),
            temperature=column([p.temperature for p in params]),
            top_k=column([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], torch.int64),
            # Off is infinite: the rounded sum of all mass may reach 1 before the last token.
            top_p=column([p.top_p if p.top_p < 1.0 else np.inf for p in params]),
            min_p=column([p.min_p for p in params]),
            keys=column(noise_keys([s.seed for s in sequences], [s.num_tokens for s in sequences]), torch.int32),
            forbidden=tuple(
                (row, tuple(s.stop_token_ids))
                for row, s in enumerate(sequences)
                if s.num_output_tokens < s.params.min_tokens and s.stop_token_ids
            ),
        )

    @classmethod
    def largest(cls, num_rows: int, device: torch.device) -> SamplingBatch:
        """Return a batch that uses every filter in every row: what takes the most memory."""
        column = torch.full((num_rows,), 0.5, device=device)
        return cls(
            all_greedy=False,
            temperature=column,
            top_k=torch.ones(num_rows, dtype=torch.int64, device=device),
            top_p=column,
            min_p=column,
            keys=torch.zeros(num_rows, 2, dtype=torch.int32, device=device),
            forbidden=(),
        )


def filter_logits(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Return ``logits`` [rows, vocab_size], already divided by the temperature, with the tokens that top-k, top-p and
    min-p exclude at -inf.

    Top-k keeps the k likeliest; top-p then keeps the fewest of those whose renormalised mass reaches p; min-p keeps
    what is at least min_p times as likely as the likeliest. The likeliest token always stays.
    """
    vocab_size = logits.shape[1]
    rows = ((batch.top_k < vocab_size) | (batch.top_p < 1.0)).nonzero().flatten()
    if rows.numel():
        ordered, order = logits[rows].sort(dim=1, descending=True, stable=True)
        ranks = torch.arange(vocab_size, device=logits.device)
        ordered.masked_fill_(ranks >= batch.top_k[rows, None], -torch.inf)
        mass = ordered.softmax(dim=1).cumsum(dim=1)
        before = mass.roll(1, dims=1).index_fill_(1, ranks[:1], 0.0)  # mass of the likelier tokens
        ordered.masked_fill_((before >= batch.top_p[rows, None]) & (ranks > 0), -torch.inf)
        logits = logits.index_copy(0, rows, torch.empty_like(ordered).scatter_(1, order, ordered))
    if bool((batch.min_p > 0).any()):
        floor = logits.amax(dim=1, keepdim=True) + batch.min_p.log()[:, None]  # log(0) is -inf: off
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Return one token id per row, int64 [rows], from float32 ``logits`` [rows, vocab_size], which may be altered."""
    for row, token_ids in batch.forbidden:
        logits[row, list(token_ids)] = -torch.inf
    greedy = logits.argmax(dim=1)
    if batch.all_greedy:
        return greedy
    is_greedy = batch.temperature == 0.0
    # Relative to the likeliest, or a tiny temperature would make several logits infinite.
    scaled = (logits - logits.amax(dim=1, keepdim=True)) / torch.where(is_greedy, 1.0, batch.temperature)[:, None]
    noise = gumbel_noise(batch.keys, logits.shape[1])
    drawn = noise.add_(filter_logits(scaled, batch)).argmax(dim=1)
    return torch.where(is_greedy, greedy, drawn)
