"""The contracts of the kernels of latent and sparse attention: what a launch must pass, and what it computes.

Dense attention over latents is computed by the kernels of any attention, whose contracts are in kernel_contracts.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from kernels.layer_ops.base import LatentCache, Norm, Rotation
from kernels.layer_ops.torch import TorchOps
from tests.gpu_rehearsal.kernel_contracts import Compute, Contract, plain, require, require_tensor

__all__ = ["CONTRACTS"]

_OPS = TorchOps()  # computes on the data, which is on the host
_MIN_DOT = 16  # tl.dot takes no smaller dimension


def _require_block(name: str, block: int, size: int) -> None:
    require(block >= size and block & (block - 1) == 0, f"{name}={block} is not a power of two from {size} on")


def _require_contiguous(call: Any, *names: str) -> None:
    for name in names:
        require(getattr(call, name).is_contiguous(), f"{name} is not contiguous")


# --- completion of queries -------------------------------------------------------------------------------------------


def rotate_and_store_latents(call: Any, grid: tuple[int, ...]) -> Compute:
    """LayerOps.rotate_and_store_latents."""
    num_tokens, num_heads, rope_dim = call.rotated.shape
    rank, width, dtype = call.RANK, call.RANK + rope_dim, call.query.dtype
    num_blocks, block_size = call.cache.shape[:2]
    constants = (call.NUM_HEADS, call.ROPE_DIM)
    require(constants == (num_heads, rope_dim) and rope_dim % 2 == 0, f"constants {constants} do not match rotated")
    sizes = {"HEADS_PADDED": num_heads, "RANK_PADDED": rank, "HALF_PADDED": rope_dim // 2}
    for name, size in sizes.items():
        _require_block(name, getattr(call, name), size)
    require_tensor("query", call.query, dtype, num_tokens, num_heads, width)
    require_tensor("rotated", call.rotated, dtype, num_tokens, num_heads, rope_dim)
    require_tensor("latent", call.latent, dtype, num_tokens, width)
    require_tensor("weight", call.weight, dtype, rank)
    require_tensor("cache", call.cache, dtype, num_blocks, block_size, width)
    require_tensor("slot_mapping", call.slot_mapping, torch.int64, num_tokens)
    _require_contiguous(call, "query", "cache", "weight", "slot_mapping")
    strides = (call.rotated_token_stride, call.rotated_head_stride, 1)
    require(strides == call.rotated.stride(), f"the strides {strides} are not those of rotated")
    require((call.latent_stride, 1) == call.latent.stride(), f"{call.latent_stride} is not the stride of latent")
    require(tuple(grid) == (num_tokens,), f"the grid {grid} is not one program for each of {num_tokens} tokens")
    slots, num_slots = plain(call.slot_mapping), num_blocks * block_size
    require(bool(((slots >= -1) & (slots < num_slots)).all()), f"slot_mapping leaves the {num_slots} slots")
    norm: Norm = SimpleNamespace(weight=plain(call.weight), eps=call.eps, adds_one=False)
    rotation, cache = _rotation(call, num_tokens, dtype), LatentCache(plain(call.cache), slots)
    parts = [plain(getattr(call, name)) for name in ("query", "rotated", "latent")]
    return lambda: _OPS.rotate_and_store_latents(*parts, norm, rotation, cache)


def _rotation(call: Any, num_tokens: int, dtype: torch.dtype) -> Rotation | None:
    if call.table is None:
        return None
    require_tensor("table", call.table, torch.float32, None, 2, call.ROPE_DIM // 2)
    require_tensor("positions", call.positions, torch.int64, num_tokens)
    _require_contiguous(call, "table", "positions")
    positions, length = plain(call.positions), call.table.shape[0]
    require(bool(((positions >= 0) & (positions < length)).all()), f"positions leaves the table of {length}")
    return Rotation(plain(call.table), positions, dtype)


# --- the choice of tokens --------------------------------------------------------------------------------------------


def _check_places(call: Any, num_rows: int, num_blocks: int | None) -> list[tuple[int, torch.Tensor]]:
    """Check the rows' positions, and the sequences' block tables; return each row's keys and its table."""
    for name in ("positions", "sequences"):
        require_tensor(name, getattr(call, name), torch.int64, num_rows)
    _require_contiguous(call, "scores", "positions", "sequences")
    require_tensor("scores", call.scores, torch.float32, num_rows, call.num_keys)
    require_tensor("block_tables", call.block_tables, torch.int32, None, None)
    strides = (call.table_stride, 1)
    require(call.block_tables.stride() == strides, f"the strides {strides} are not those of block_tables")
    positions, sequences, tables = (plain(getattr(call, name)) for name in ("positions", "sequences", "block_tables"))
    most = min(call.num_keys, tables.shape[1] * call.BLOCK_SIZE)
    require(bool(((positions >= -1) & (positions < most)).all()), f"positions leaves the {most} keys")
    in_tables = (sequences >= 0) & (sequences < len(tables))
    require(bool(in_tables.all()), f"sequences leaves the {len(tables)} block tables")
    if num_blocks is not None:
        is_block = (tables >= -1) & (tables < num_blocks)
        require(bool(is_block.all()), f"block_tables names a block outside {num_blocks}")
    rows = zip(positions.tolist(), sequences.tolist(), strict=True)
    return [(position + 1, tables[sequence]) for position, sequence in rows]


def _blocks(table: torch.Tensor, num_keys: int, block_size: int) -> torch.Tensor:
    return table.repeat_interleave(block_size)[:num_keys].long()


def index_scores(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.attention.triton.indexer.index_scores_kernel: the scores of the keys that a query sees."""
    num_rows, num_heads, head_dim = call.query.shape
    num_blocks, block_size, _ = call.key_cache.shape
    constants = (call.NUM_HEADS, call.HEAD_DIM, call.BLOCK_SIZE)
    require(constants == (num_heads, head_dim, block_size), f"constants {constants} do not match")
    _require_block("HEADS_PADDED", call.HEADS_PADDED, max(_MIN_DOT, num_heads))
    _require_block("DIM_PADDED", call.DIM_PADDED, max(_MIN_DOT, head_dim))
    _require_block("TILE", call.TILE, _MIN_DOT)
    require_tensor("key_cache", call.key_cache, call.query.dtype, num_blocks, block_size, head_dim)
    require_tensor("weights", call.weights, torch.float32, num_rows, num_heads)
    _require_contiguous(call, "key_cache", "weights")
    strides = (call.query_token_stride, call.query_head_stride, 1)
    require(strides == call.query.stride(), f"the strides {strides} are not those of query")
    require(grid[0] == num_rows and grid[1] >= 1, f"the grid {grid} does not have programs for {num_rows} queries")
    rows = _check_places(call, num_rows, num_blocks)

    def compute() -> None:
        keys, query = plain(call.key_cache), plain(call.query).float()
        for row, (num_keys, table) in enumerate(rows):
            blocks = _blocks(table, num_keys, block_size)
            seen = keys[blocks.clamp(min=0), torch.arange(num_keys) % block_size].float()
            scores = plain(call.weights)[row] @ (query[row] @ seen.T * call.scale).relu()
            plain(call.scores)[row, :num_keys] = scores.masked_fill(blocks < 0, -torch.inf)

    return compute


def choose(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.attention.triton.indexer.choose_kernel."""
    num_rows = call.scores.shape[0]
    require(1 <= call.top_k <= call.num_keys, f"{call.top_k} of {call.num_keys} keys are chosen")
    _require_block("TILE", call.TILE, 1)
    require(tuple(grid) == (num_rows,), f"the grid {grid} is not one program for each of {num_rows} queries")
    return _choose(call, num_rows)


def _choose(call: Any, num_rows: int) -> Compute:
    require_tensor("slots", call.slots, torch.int32, num_rows, call.top_k)
    _require_contiguous(call, "slots")
    rows = _check_places(call, num_rows, None)

    def compute() -> None:
        plain(call.slots).fill_(-1)
        for row, (num_keys, table) in enumerate(rows):
            scores = plain(call.scores)[row, :num_keys]
            visible = (scores > -torch.inf).nonzero().flatten()
            if not len(visible):
                continue
            best = scores[visible].sort(descending=True, stable=True).indices[: call.top_k].sort().values
            chosen = visible[best]
            slots = _blocks(table, num_keys, call.BLOCK_SIZE)[chosen] * call.BLOCK_SIZE + chosen % call.BLOCK_SIZE
            plain(call.slots)[row, : len(chosen)] = slots.int()

    return compute


def _require_chunks(call: Any, grid: tuple[int, ...], *scratch: str) -> int:
    """Check what the kernels of split_choice.py take; return the number of queries."""
    num_rows, num_chunks = call.scores.shape[0], -(-call.num_keys // call.CHUNK)
    require_tensor("scores", call.scores, torch.float32, num_rows, call.num_keys)
    shapes = {
        "counts": (torch.int32, num_rows, call.LEVELS, num_chunks, 256),
        "states": (torch.int64, num_rows, call.LEVELS + 1, 2),
        "chosen": (torch.int32, num_rows, num_chunks, 2),
    }
    for name in scratch:
        dtype, *shape = shapes[name]
        require_tensor(name, getattr(call, name), dtype, *shape)
        _require_contiguous(call, name)
    require_tensor("positions", call.positions, torch.int64, num_rows)
    require(tuple(grid) == (num_rows, num_chunks), f"the grid {grid} is not one program for each chunk")
    require(1 <= call.top_k <= call.num_keys, f"{call.top_k} of {call.num_keys} keys are chosen")
    return num_rows


def count_digits(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.attention.triton.split_choice.count_digits_kernel, whose counts only the next two kernels read."""
    _require_chunks(call, grid, "counts", "states")
    require(0 <= call.level < call.LEVELS, f"keys have no digit {call.level}")
    return lambda: None


def count_chosen(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.attention.triton.split_choice.count_chosen_kernel, likewise."""
    _require_chunks(call, grid, "counts", "states", "chosen")
    return lambda: None


def list_chosen(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.attention.triton.split_choice.list_chosen_kernel."""
    num_rows = _require_chunks(call, grid, "states", "chosen")
    return _choose(call, num_rows)


# --- attention to them -----------------------------------------------------------------------------------------------


def _check_slots(call: Any, num_tokens: int, num_slots: int) -> list[int]:
    """Check each query's slots; return how many it has."""
    require_tensor("topk_slots", call.topk_slots, torch.int32, num_tokens, call.slots_stride)
    require_tensor("num_chosen", call.num_chosen, torch.int32, num_tokens)
    _require_contiguous(call, "topk_slots", "num_chosen")
    slots, counts = plain(call.topk_slots), plain(call.num_chosen)
    require(torch.equal((slots >= 0).sum(dim=1), counts.long()), "num_chosen does not count topk_slots")
    is_slot = torch.arange(slots.shape[1]) < counts[:, None]
    inside = ((slots >= 0) & (slots < num_slots)) == is_slot
    require(bool((inside & (is_slot | (slots == -1))).all()), f"topk_slots leaves the {num_slots} slots, then -1")
    return list(counts.tolist())


def sparse(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.attention.triton.sparse.sparse_kernel."""
    num_tokens, num_heads, head_dim = call.query.shape
    num_blocks, block_size = call.latents.shape[:2]
    value_dim, dtype = call.VALUE_DIM, call.query.dtype
    sizes = (num_heads, head_dim)
    constants = (call.NUM_HEADS, value_dim + call.REST_DIM)
    require(constants == sizes, f"constants {constants} are not {sizes}")
    _require_block("VALUE_PADDED", call.VALUE_PADDED, max(_MIN_DOT, value_dim))
    _require_block("REST_PADDED", call.REST_PADDED, max(_MIN_DOT, call.REST_DIM))
    for name in ("ROWS", "TILE"):
        _require_block(name, getattr(call, name), _MIN_DOT)
    require_tensor("latents", call.latents, dtype, num_blocks, block_size, 1, head_dim)
    require_tensor("output", call.output, dtype, num_tokens, num_heads, value_dim)
    _require_contiguous(call, "latents", "output")
    strides = (call.query_token_stride, call.query_head_stride, 1)
    require(strides == call.query.stride(), f"the strides {strides} are not those of query")
    wanted = (num_tokens, -(-num_heads // call.ROWS))
    require(tuple(grid) == wanted, f"the grid {grid} is not one program for each of {wanted} tokens and tiles of heads")
    counts = _check_slots(call, num_tokens, num_blocks * block_size)

    def compute() -> None:
        latents, query = plain(call.latents).flatten(0, 2), plain(call.query).double()
        plain(call.output).zero_()
        for row, count in enumerate(counts):
            if count:
                keys = latents[plain(call.topk_slots)[row, :count].long()].double()
                weights = (query[row] @ keys.T * call.scale).softmax(dim=-1)
                plain(call.output)[row] = (weights @ keys[:, :value_dim]).to(dtype)

    return compute


CONTRACTS: dict[str, Contract] = {
    "rotate_and_store_latents_kernel": rotate_and_store_latents,
    "index_scores_kernel": index_scores,
    "choose_kernel": choose,
    "count_digits_kernel": count_digits,
    "count_chosen_kernel": count_chosen,
    "list_chosen_kernel": list_chosen,
    "sparse_kernel": sparse,
}
