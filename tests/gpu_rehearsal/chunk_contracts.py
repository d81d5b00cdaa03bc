"""The contracts of the kernels that compute prompts of recurrent layers in chunks.

Each computes its kernel's own results, in float32, so that the kernels' results fit together as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from tests.gpu_rehearsal.kernel_contracts import Compute, Contract, plain, require, require_tensor
from tests.gpu_rehearsal.recurrent_contracts import check_batch, check_bounds, check_heads, check_saves, check_state

__all__ = ["CONTRACTS"]

_NORM_EPS = 1e-6
_MAX_SHORT = 16
_Chunk = tuple[int, int, int, int]  # first token, token after the last, index, sequence


def _chunks(call: Any) -> Iterator[_Chunk]:
    """Return the chunks of a step: sequences are cut after tokens whose state is saved, and then every CHUNK tokens."""
    bounds, slots, saves = (plain(getattr(call, name)).tolist() for name in ("cu_seqlens", "slots", "save_tokens"))
    for sequence in range(call.num_decodes, len(slots)):
        first, end = bounds[sequence : sequence + 2]
        while slots[sequence] >= 0 and bounds[sequence + 1] - bounds[sequence] > call.max_short and first < end:
            save = sum(token < first for token in saves)
            stop = min([end, *(token + 1 for token in saves[save : save + 1])])
            for number, start in enumerate(range(first, stop, call.CHUNK)):
                yield start, min(start + call.CHUNK, stop), first // call.CHUNK + sequence + save + number, sequence
            first = stop


def _check_chunks(call: Any, grid: tuple[int, ...], num_tokens: int) -> list[_Chunk]:
    """Check what the kernels of single chunks have in common; return the chunks."""
    num_seqs = call.num_seqs
    require_tensor("cu_seqlens", call.cu_seqlens, torch.int32, num_seqs + 1)
    require_tensor("slots", call.slots, torch.int32, num_seqs)
    require_tensor("save_tokens", call.save_tokens, torch.int32, call.num_saves)
    require(call.max_short == _MAX_SHORT, f"max_short is {call.max_short}")
    require(0 <= call.num_decodes <= num_seqs, f"{call.num_decodes} of {num_seqs} sequences are decodes")
    check_bounds(call.cu_seqlens, num_tokens)
    decodes = plain(call.cu_seqlens)[: call.num_decodes + 1].tolist()
    require(decodes == list(range(call.num_decodes + 1)), f"the decodes have the bounds {decodes}")
    chunks, first = list(_chunks(call)), call.num_decodes // call.CHUNK + call.num_decodes
    indices = [index for _, _, index, _ in chunks]
    require(len(set(indices)) == len(indices), f"two chunks have the same index: {indices}")
    require(grid[1] == call.NUM_HEADS, f"the grid {grid} is not one program for each of {call.NUM_HEADS} heads")
    require(all(first <= index < first + grid[0] for index in indices), f"the grid {grid} misses one of {indices}")
    require(all(index < len(call.kept) for index in indices), f"one of {indices} exceeds kept, {len(call.kept)}")
    return chunks


def _check_outputs(call: Any, dtype: torch.dtype, num_tokens: int, num_scales: int) -> None:
    require_tensor("scores", call.scores, dtype, num_tokens, call.NUM_HEADS, call.CHUNK)
    require_tensor("scales", call.scales, torch.float32, num_tokens, call.NUM_HEADS, num_scales)
    require_tensor("kept", call.kept, torch.float32, None, call.NUM_HEADS)
    for name in ("scores", "scales", "kept"):
        require(getattr(call, name).is_contiguous(), f"{name} is not contiguous")


def _check_delta_rule(call: Any) -> torch.dtype:
    """Check what both forms of the delta rule's chunks have in common; return the dtype of the tokens."""
    num_tokens, num_key_heads, key_dim = call.key.shape
    sizes, constants = (num_key_heads * call.HEADS_PER_KEY, key_dim), (call.NUM_HEADS, call.KEY_DIM)
    require(constants == sizes, f"constants {constants} are not {sizes}")
    require((call.eps, call.query_scale) == (_NORM_EPS, key_dim**-0.5), f"eps is {call.eps}")
    dtype: torch.dtype = call.key.dtype
    for name in ("query", "key"):
        stride = getattr(call, f"{name}_stride")
        check_heads(name, getattr(call, name), stride, dtype, num_tokens, num_key_heads, key_dim)
    require_tensor("beta", call.beta, torch.float32, num_tokens, call.NUM_HEADS)
    require_tensor("solutions", call.solutions, dtype, num_tokens, call.NUM_HEADS, call.CHUNK)
    for name in ("decay", "beta", "solutions"):
        require(getattr(call, name).is_contiguous(), f"{name} is not contiguous")
    return dtype


def _of_heads(call: Any, tensor: torch.Tensor, part: slice) -> torch.Tensor:
    """Return a chunk's queries or keys of each head of values, [tokens, heads, key_dim]."""
    return plain(tensor)[part].float().repeat_interleave(call.HEADS_PER_KEY, 1)


def _norms(call: Any, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the delta rule multiplies keys and queries with, [tokens, heads]."""
    keys, queries = (
        (_of_heads(call, tensor, part).square().sum(2) + call.eps).rsqrt() for tensor in (call.key, call.query)
    )
    return keys, queries * call.query_scale


def _scaled(call: Any, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a chunk's queries and keys as the delta rule reads them, [tokens, heads, key_dim]."""
    key_norms, query_norms = _norms(call, part)
    q, k = _of_heads(call, call.query, part), _of_heads(call, call.key, part)
    return q * query_norms[..., None], k * key_norms[..., None]


def _store_squares(call: Any, part: slice, keys: torch.Tensor, queries: torch.Tensor) -> None:
    """Write T and P, from the decayed products [heads, tokens, tokens] of keys, and of queries with keys."""
    count, strengths = keys.shape[1], plain(call.beta)[part].t()
    solved = torch.linalg.inv(torch.eye(count) + (strengths[:, :, None] * keys).tril(-1)) * strengths[:, None, :]
    for to, square in ((call.solutions, solved), (call.scores, queries)):
        plain(to)[part] = F.pad(square.transpose(0, 1), (0, call.CHUNK - count)).to(to.dtype)


def _decays(decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return e to the sums of [tokens, heads] up to each token, after it, and [heads, tokens, tokens] between two."""
    sums = decay.double().clamp(min=-100).cumsum(0)
    between = (sums.t()[:, :, None] - sums.t()[:, None, :]).tril().exp().tril()
    return sums.exp().float(), (sums[-1] - sums).exp().float(), between.float()


def delta_rule_chunks(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.recurrent.triton.chunked_delta_rule.delta_rule_chunks_kernel."""
    dtype, num_tokens = _check_delta_rule(call), len(call.key)
    require_tensor("decay", call.decay, torch.float32, num_tokens, call.NUM_HEADS)
    _check_outputs(call, dtype, num_tokens, 3)
    chunks = _check_chunks(call, grid, num_tokens)

    def compute() -> None:
        for start, end, index, _ in chunks:
            part = slice(start, end)
            q, k = _scaled(call, part)
            norms, query_norms = _norms(call, part)
            upto, after, between = _decays(plain(call.decay)[part])
            q, k = q.transpose(0, 1), k.transpose(0, 1)
            _store_squares(call, part, between * (k @ k.mT), between * (q @ k.mT))
            plain(call.scales)[part] = torch.stack((query_norms * upto, norms * after, norms * upto), dim=2)
            plain(call.kept)[index] = upto[-1]

    return compute


def row_decays_chunks(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.recurrent.triton.chunked_row_decays.row_decays_chunks_kernel."""
    dtype, num_tokens = _check_delta_rule(call), len(call.key)
    rows = (num_tokens, call.NUM_HEADS, call.KEY_DIM)
    require_tensor("decay", call.decay, torch.float32, *rows)
    require_tensor("scores", call.scores, dtype, num_tokens, call.NUM_HEADS, call.CHUNK)
    require_tensor("kept", call.kept, torch.float32, None, *rows[1:])
    for name in ("read_queries", "written_keys", "read_keys"):
        require_tensor(name, getattr(call, name), dtype, *rows)
    for name in ("scores", "kept", "read_queries", "written_keys", "read_keys"):
        require(getattr(call, name).is_contiguous(), f"{name} is not contiguous")
    chunks = _check_chunks(call, grid, num_tokens)

    def compute() -> None:
        for start, end, index, _ in chunks:
            part = slice(start, end)
            q, k = _scaled(call, part)
            sums = plain(call.decay)[part].double().clamp(min=-100).cumsum(0)
            between = (sums[:, None] - sums[None]).clamp(max=0).exp().float()  # [tokens, tokens, heads, key_dim]
            products = (torch.einsum("ihd,jhd,ijhd->hij", x, k, between).tril() for x in (k, q))
            _store_squares(call, part, *products)
            upto, after = sums.exp().float(), (sums[-1] - sums).exp().float()
            for to, scaled in (
                (call.read_queries, q * upto),
                (call.written_keys, k * after),
                (call.read_keys, k * upto),
            ):
                plain(to)[part] = scaled.to(dtype)
            plain(call.kept)[index] = upto[-1]

    return compute


def scan_chunks(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.recurrent.triton.chunked_scan.scan_chunks_kernel."""
    num_tokens, num_groups, state_size = call.keys.shape
    repeats = call.HEADS_PER_GROUP
    sizes, constants = (num_groups * repeats, state_size), (call.NUM_HEADS, call.STATE_SIZE)
    require(constants == sizes, f"constants {constants} are not {sizes}")
    dtype = call.keys.dtype
    for name, stride in (("keys", call.key_stride), ("queries", call.query_stride)):
        check_heads(name, getattr(call, name), stride, dtype, num_tokens, num_groups, state_size)
    require_tensor("steps", call.steps, torch.float32, num_tokens, call.NUM_HEADS)
    for name in ("decay", "skip"):
        require_tensor(name, getattr(call, name), torch.float32, call.NUM_HEADS)
    for name in ("steps", "decay", "skip"):
        require(getattr(call, name).is_contiguous(), f"{name} is not contiguous")
    _check_outputs(call, dtype, num_tokens, 2)
    chunks = _check_chunks(call, grid, num_tokens)
    keys, queries, steps = (plain(getattr(call, name)).float() for name in ("keys", "queries", "steps"))
    decay, skip = plain(call.decay), plain(call.skip)

    def compute() -> None:
        for start, end, index, _ in chunks:
            part = slice(start, end)
            q, k = (x[part].repeat_interleave(repeats, 1).transpose(0, 1) for x in (queries, keys))
            upto, after, between = _decays(steps[part] * decay)
            factors = q @ k.mT * between * steps[part].t()[:, None, :]
            factors += torch.eye(end - start) * skip[:, None, None]
            plain(call.scores)[part] = F.pad(factors.transpose(0, 1), (0, call.CHUNK - (end - start))).to(dtype)
            plain(call.scales)[part] = torch.stack((upto, after * steps[part]), dim=2)
            plain(call.kept)[index] = upto[-1]

    return compute


def carry_states(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.recurrent.triton.states.carry_states_kernel."""
    (num_tokens, num_key_heads, key_dim), (_, num_heads, value_dim) = call.key.shape, call.value.shape
    repeats = num_heads // num_key_heads
    sizes = (num_heads, repeats, key_dim, value_dim)
    constants = (call.NUM_HEADS, call.HEADS_PER_KEY, call.KEY_DIM, call.VALUE_DIM)
    require(constants == sizes, f"constants {constants} are not {sizes}")
    dtype = call.value.dtype
    for name in ("query", "key"):
        stride = call.query_stride if name == "query" else call.key_stride
        check_heads(name, getattr(call, name), stride, dtype, num_tokens, num_key_heads, key_dim)
    check_heads("value", call.value, call.value_stride, dtype, num_tokens, num_heads, value_dim)
    require_tensor("output", call.output, dtype, num_tokens, num_heads, value_dim)
    require_tensor("scores", call.scores, dtype, num_tokens, num_heads, call.CHUNK)
    require(call.output.is_contiguous() and call.scores.is_contiguous(), "an output is not contiguous")
    shape = (num_heads, value_dim, key_dim) if call.TRANSPOSED else (num_heads, key_dim, value_dim)
    metadata = check_batch(call, num_tokens, check_state(call.state, *shape))
    wanted = (-(-value_dim // call.BLOCK_VALUE), num_heads, metadata.num_seqs - call.num_decodes)
    require(tuple(grid) == wanted, f"the grid {grid} is not one program for each of {wanted} blocks")
    check_saves(metadata.save_tokens.tolist(), metadata.save_slots.tolist(), [], len(call.state), num_tokens)
    saves = dict(zip(metadata.save_tokens.tolist(), metadata.save_slots.tolist(), strict=True))
    value, chunks, state = plain(call.value).float(), list(_chunks(call)), plain(call.state)

    def compute() -> None:
        past, scores = {}, plain(call.scores).float()
        for start, end, index, sequence in chunks:
            part, slot = slice(start, end), int(metadata.slots[sequence])
            if sequence not in past:
                before = state[slot] * (1 - int(metadata.starts[sequence]))
                past[sequence] = before.mT if call.TRANSPOSED else before
            before = past[sequence]
            reader = call.key if call.reading_key is None else call.reading_key
            q, k, reading = (_of_heads(call, x, part).transpose(0, 1) for x in (call.query, call.key, reader))
            scales, kept = torch.ones(3, 1, 1, 1), plain(call.kept)[index].view(num_heads, -1, 1)
            if call.scales is not None:
                scales = plain(call.scales)[part].permute(2, 1, 0)[..., None]
            change = value[part].transpose(0, 1)
            if call.solutions is not None:
                solved = plain(call.solutions).float()[part, :, : end - start].transpose(0, 1)
                change = solved @ (change - reading @ before * scales[2])
            read = q @ before * scales[0] + scores[part, :, : end - start].transpose(0, 1) @ change
            plain(call.output)[part] = read.transpose(0, 1).to(dtype)
            after = before * kept + k.mT @ (change * scales[1])
            past[sequence] = after
            for to in (saves.get(end - 1, -1), slot if end == metadata.cu_seqlens[sequence + 1] else -1):
                if to >= 0:
                    state[to] = after.mT if call.TRANSPOSED else after

    return compute


CONTRACTS: dict[str, Contract] = {
    "delta_rule_chunks_kernel": delta_rule_chunks,
    "row_decays_chunks_kernel": row_decays_chunks,
    "scan_chunks_kernel": scan_chunks,
    "carry_states_kernel": carry_states,
}
