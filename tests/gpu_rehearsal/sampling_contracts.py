"""The contracts of the kernels of kernels/sampling: what a launch must pass, and what it computes."""

from __future__ import annotations

from typing import Any

import torch

from kernels.sampling import reference
from kernels.sampling.base import Limits
from kernels.sampling.exact_math import TOKENS_OF_PART, noisy_logits
from tests.gpu_rehearsal.kernel_contracts import Compute, Contract, plain, require, require_tensor

__all__ = ["CONTRACTS"]


def _rows_of(call: Any, logits: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Check the logits and the indices of a launch; return the rows that it reads."""
    require_tensor("logits", logits, torch.float32, None, call.vocab_size)
    require(logits.stride(1) == 1, "logits are not contiguous in their last dimension")
    require(call.stride == logits.stride(0), f"{call.stride} is not the stride of the rows, {logits.stride(0)}")
    return plain(logits)[_indices(call, num_rows, len(logits))]


def _indices(call: Any, num_rows: int, batch_size: int) -> torch.Tensor:
    if call.indices is None:
        require(num_rows <= batch_size, f"{num_rows} rows of a batch of {batch_size}")
        return torch.arange(num_rows)
    require_tensor("indices", call.indices, torch.int64, num_rows)
    indices = plain(call.indices)
    require(bool(((indices >= 0) & (indices < batch_size)).all()), f"indices leave the batch of {batch_size}")
    require(len(indices.unique()) == num_rows, "a row is served twice")
    return indices


def _require_column(name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    require_tensor(name, tensor, dtype, *shape)
    require(tensor.is_contiguous(), f"{name} is not contiguous")


def best_of_tokens(call: Any, grid: tuple[int, ...]) -> Compute:
    """The parts hold the token that is best in each block, as the kernels do not compute here."""
    num_rows, num_parts = grid
    require(num_parts * call.BLOCK >= call.vocab_size > (num_parts - 1) * call.BLOCK, f"the grid {grid}")
    _require_column("parts", call.parts, torch.int64, num_rows, num_parts)
    rows = _rows_of(call, call.logits, num_rows)
    require((call.temperatures is None) == (call.keys is None), "temperatures and keys belong together")
    if call.temperatures is not None:
        _require_column("temperatures", call.temperatures, torch.float32, num_rows, 1)
        _require_column("keys", call.keys, torch.int32, num_rows, 2)

    def compute() -> None:
        noisy = rows
        if call.temperatures is not None:
            noisy = noisy_logits(rows, plain(call.temperatures), plain(call.keys))
        # The first part has the row's token, plus one; the others have less.
        plain(call.parts).zero_()[:, 0] = reference.argmax(noisy) + 1

    return compute


def best_of_parts(call: Any, grid: tuple[int, ...]) -> Compute:
    """See best_of_tokens."""
    (num_rows,) = grid
    require(call.num_parts <= call.PARTS_PADDED, f"PARTS_PADDED={call.PARTS_PADDED} of {call.num_parts}")
    require(call.PARTS_PADDED & (call.PARTS_PADDED - 1) == 0, f"PARTS_PADDED={call.PARTS_PADDED} is not a power of two")
    _require_column("parts", call.parts, torch.int64, num_rows, call.num_parts)
    _require_column("tokens", call.tokens, torch.int64, len(call.tokens))
    indices = _indices(call, num_rows, len(call.tokens))

    def compute() -> None:
        plain(call.tokens)[indices] = plain(call.parts).amax(dim=1) - 1

    return compute


def group_maxima(call: Any, grid: tuple[int, ...]) -> Compute:
    """Only the draw reads what this writes, and here it does not need them."""
    num_rows, num_programs = grid
    require(call.num_groups == -(-call.vocab_size // call.GROUP), f"{call.num_groups} groups of {call.GROUP}")
    require(num_programs * call.GROUPS >= call.num_groups, f"the grid {grid} does not cover {call.num_groups} groups")
    _require_column("maxima", call.maxima, torch.int32, num_rows, call.num_groups)
    _require_column("parts", call.parts, torch.int64, num_rows, 2, num_programs)
    require(call.GROUP * call.GROUPS == TOKENS_OF_PART, f"parts of {call.GROUP} x {call.GROUPS} tokens")
    _require_column("top_k", call.top_k, torch.int64, num_rows, 1)
    for name in ("temperatures", "top_p"):
        _require_column(name, getattr(call, name), torch.float32, num_rows, 1)
    _rows_of(call, call.logits, num_rows)
    return lambda: plain(call.maxima).fill_(0)


def truncated_draw(call: Any, grid: tuple[int, ...]) -> Compute:
    """SamplingOps.truncated_draw."""
    (num_rows,) = grid
    rows = _rows_of(call, call.logits, num_rows)
    padded = call.GROUPS_PADDED
    require(call.num_groups <= padded and padded & (padded - 1) == 0, f"GROUPS_PADDED={padded} of {call.num_groups}")
    _require_column("maxima", call.maxima, torch.int32, num_rows, -(-call.vocab_size // call.GROUP))
    num_parts = -(-call.vocab_size // TOKENS_OF_PART)
    require(call.num_parts == num_parts <= call.PARTS_PADDED, f"{call.num_parts} of {call.PARTS_PADDED} parts")
    _require_column("parts", call.parts, torch.int64, num_rows, 2, num_parts)
    _require_column("candidates", call.candidates, torch.int32, num_rows, 2, call.vocab_size)
    _require_column("tokens", call.tokens, torch.int64, len(call.logits))
    _require_column("noise_keys", call.noise_keys, torch.int32, num_rows, 2)
    _require_column("top_k", call.top_k, torch.int64, num_rows, 1)
    for name in ("temperatures", "top_p", "floors"):
        _require_column(name, getattr(call, name), torch.float32, num_rows, 1)
    top_k = plain(call.top_k)
    require(bool(((top_k > 0) & (top_k <= call.vocab_size)).all()), f"top_k leaves the vocabulary: {top_k.tolist()}")
    limits = Limits(top_k, plain(call.top_p), plain(call.floors))
    indices = _indices(call, num_rows, len(call.logits))

    def compute() -> None:
        drawn = reference.truncated_draw(rows, plain(call.temperatures), plain(call.noise_keys), limits)
        plain(call.tokens)[indices] = drawn

    return compute


def _changed_logits(call: Any) -> torch.Tensor:
    """Check the logits that a launch changes; return their data."""
    logits = call.logits
    require_tensor("logits", logits, torch.float32, None, None)
    require(logits.stride(1) == 1, "logits are not contiguous in their last dimension")
    require(call.stride == logits.stride(0), f"{call.stride} is not the stride of the rows, {logits.stride(0)}")
    return plain(logits)


def change_tokens(call: Any, grid: tuple[int, ...]) -> Compute:
    """SamplingOps.add_biases, forbid_tokens and forbid_words."""
    logits, count = _changed_logits(call), call.num_pairs
    require(grid[0] * call.BLOCK >= count > 0, f"the grid {grid} does not cover {count} tokens")
    for name in ("indices", "token_ids"):
        _require_column(name, getattr(call, name), torch.int64, count)
    rows, token_ids = plain(call.indices), plain(call.token_ids)
    require(bool(((rows >= 0) & (rows < len(logits))).all()), f"indices leave the batch of {len(logits)}")
    require(bool(((token_ids >= 0) & (token_ids < logits.shape[1])).all()), "token ids leave the vocabulary")
    kinds = (call.biases, call.missing, call.words)
    require(sum(kind is not None for kind in kinds) == 1, "one of biases, missing and words says what changes")
    if call.words is None:
        require(len(set(zip(rows.tolist(), token_ids.tolist(), strict=True))) == count, "a logit is changed twice")
    if call.biases is not None:
        _require_column("biases", call.biases, torch.float32, *call.biases.shape)
        require(call.biases.numel() == count, f"{call.biases.numel()} biases of {count} tokens")
        return lambda: reference.add_biases(logits, rows, token_ids, plain(call.biases).view(-1))
    if call.missing is not None:
        _require_column("missing", call.missing, torch.int64, count)
        return lambda: reference.forbid_tokens(logits, rows, token_ids, plain(call.missing))
    _require_column("words", call.words, torch.int64, count, call.width)
    _require_column("owners", call.owners, torch.int64, count)
    _require_column("tails", call.tails, torch.int64, len(call.tails), call.width)
    words, owners, tails = (plain(item) for item in (call.words, call.owners, call.tails))
    require(bool(((owners >= 0) & (owners < len(tails))).all()), f"owners leave the {len(tails)} sequences")
    return lambda: reference.forbid_words(logits, rows, token_ids, words, owners, tails)


def penalise(call: Any, grid: tuple[int, ...]) -> Compute:
    """SamplingOps.penalise_repetition and penalise_counts."""
    logits, (num_rows, num_blocks) = _changed_logits(call), grid
    require(call.vocab_size == logits.shape[1], f"{call.vocab_size} tokens of {logits.shape[1]}")
    require(num_blocks * call.BLOCK >= call.vocab_size, f"the grid {grid} does not cover {call.vocab_size} tokens")
    rows, repeats = _indices(call, num_rows, len(logits)), call.repetition is not None
    require((call.frequency is None) == (call.presence is None) == repeats, "penalties of two kinds, or of none")
    _require_column("history", call.history, torch.uint8 if repeats else torch.int32, num_rows, call.vocab_size)
    names = ("repetition",) if repeats else ("frequency", "presence")
    for name in names:
        _require_column(name, getattr(call, name), torch.float32, num_rows, 1)
    history, penalties = plain(call.history), [plain(getattr(call, name)) for name in names]
    if repeats:
        return lambda: reference.penalise_repetition(logits, rows, history.bool(), *penalties)
    return lambda: reference.penalise_counts(logits, rows, history, *penalties)


def bitmask(call: Any, grid: tuple[int, ...]) -> Compute:
    """SamplingOps.apply_bitmask."""
    logits, (num_rows, num_blocks) = _changed_logits(call), grid
    require(call.vocab_size == logits.shape[1], f"{call.vocab_size} tokens of {logits.shape[1]}")
    require(call.num_words == -(-call.vocab_size // 32), f"{call.num_words} words of {call.vocab_size} tokens")
    require(num_blocks * call.WORDS >= call.num_words, f"the grid {grid} does not cover {call.num_words} words")
    _require_column("bitmask", call.bitmask, torch.int32, num_rows, call.num_words)
    rows = _indices(call, num_rows, len(logits))
    return lambda: reference.apply_bitmask(logits, rows, plain(call.bitmask))


CONTRACTS: dict[str, Contract] = {
    "change_tokens_kernel": change_tokens,
    "penalise_kernel": penalise,
    "bitmask_kernel": bitmask,
    "best_of_tokens_kernel": best_of_tokens,
    "best_of_parts_kernel": best_of_parts,
    "group_maxima_kernel": group_maxima,
    "truncated_draw_kernel": truncated_draw,
}
