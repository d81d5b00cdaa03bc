"""The contracts of the kernels of kernels/recurrent: what a launch must pass, and what it computes."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from kernels.recurrent.reference import ReferenceOps
from kernels.recurrent_metadata import RecurrentMetadata
from tests.gpu_rehearsal.kernel_contracts import Compute, Contract, plain, require, require_tensor

__all__ = ["CONTRACTS", "check_batch", "check_bounds", "check_heads", "check_saves", "check_state"]

_OPS = ReferenceOps()  # computes on the data, which is on the host
_NORM_EPS = 1e-6
_MOST_OFFSET = 2**31  # within a slot: kernels compute it in int32


# --- the batch -------------------------------------------------------------------------------------------------------


def check_bounds(cu_seqlens: torch.Tensor, num_tokens: int) -> None:
    bounds = plain(cu_seqlens).tolist()
    require(bounds[0] == 0 and bounds[-1] == num_tokens, f"cu_seqlens {bounds} are not those of {num_tokens} tokens")
    require(all(start <= end for start, end in pairwise(bounds)), f"cu_seqlens {bounds} descends")


def _check_slots(slots: list[int], starts: list[int], num_slots: int) -> None:
    used = [slot for slot in slots if slot != -1]
    require(all(0 <= slot < num_slots for slot in used), f"slots {slots} leaves the {num_slots} slots")
    require(len(set(used)) == len(used), f"slots {slots}: two sequences share a slot")
    require(set(starts) <= {0, 1}, f"starts {starts} are not flags")


def check_saves(tokens: list[int], save_slots: list[int], slots: list[int], num_slots: int, num_tokens: int) -> None:
    saves = [(token, slot) for token, slot in zip(tokens, save_slots, strict=True) if slot != -1]
    padding = tokens[len(saves) :]
    require(all(slot == -1 for slot in save_slots[len(saves) :]), f"save_slots {save_slots}: padding is not last")
    require(all(token >= num_tokens for token in padding), f"save_tokens {tokens}: padding names a token")
    written = [slot for _, slot in saves]
    require(all(0 <= slot < num_slots for slot in written), f"save_slots {save_slots} leaves the {num_slots} slots")
    require(len({*written, *slots}) == len(written) + len(set(slots)), f"save_slots {save_slots} meets {slots}")
    own = [token for token, _ in saves]
    require(all(first < second for first, second in pairwise(own)), f"save_tokens {tokens} does not ascend")
    require(all(0 <= token < num_tokens for token in own), f"save_tokens {tokens} leaves the {num_tokens} tokens")


def check_batch(call: Any, num_tokens: int, num_slots: int) -> RecurrentMetadata:
    """Check the batch as RecurrentMetadata documents it, values included; return its data."""
    num_seqs, num_saves = call.slots.shape[0], call.num_saves
    sizes = {"cu_seqlens": num_seqs + 1, "slots": num_seqs, "starts": num_seqs}
    for name, size in {**sizes, "save_tokens": num_saves, "save_slots": num_saves}.items():
        require_tensor(name, getattr(call, name), torch.int32, size)
        require(getattr(call, name).is_contiguous(), f"{name} is not contiguous")
    names = ("cu_seqlens", "slots", "starts", "save_tokens", "save_slots")
    metadata = RecurrentMetadata(*(plain(getattr(call, name)) for name in names), num_decodes=0)
    slots = metadata.slots.tolist()
    check_bounds(call.cu_seqlens, num_tokens)
    _check_slots(slots, metadata.starts.tolist(), num_slots)
    check_saves(metadata.save_tokens.tolist(), metadata.save_slots.tolist(), slots, num_slots, num_tokens)
    return metadata


def check_state(state: torch.Tensor, *shape: int) -> int:
    """Check a layer's states; return the number of slots."""
    require_tensor("state", state, torch.float32, None, *shape)
    require(state.is_contiguous(), "state is not contiguous")
    require(math.prod(shape) < _MOST_OFFSET, f"a slot has {math.prod(shape)} elements, too many for int32")
    return state.shape[0]


def _computed_tokens(metadata: RecurrentMetadata) -> torch.Tensor:
    """Return the tokens of sequences that have a slot; the kernels write no output of others."""
    has_slot = (metadata.slots >= 0).repeat_interleave(metadata.cu_seqlens.diff().long())
    return has_slot.nonzero().flatten()


def _short(metadata: RecurrentMetadata, max_length: int) -> RecurrentMetadata:
    """Return a batch in which the longer sequences are padding: other kernels compute them."""
    return replace(metadata, slots=metadata.slots.where(metadata.cu_seqlens.diff() <= max_length, -1))


# --- convolutions ----------------------------------------------------------------------------------------------------


def _check_conv(call: Any) -> None:
    num_tokens, channels = call.inputs.shape
    dtype = call.inputs.dtype
    require((channels, call.weight.shape[1]) == (call.CHANNELS, call.WIDTH), "constants do not match the weight")
    require_tensor("output", call.output, dtype, num_tokens, channels)
    require_tensor("weight", call.weight, dtype, channels, call.WIDTH)
    if call.bias is not None:
        require_tensor("bias", call.bias, dtype, channels)
    for name in ("output", "weight"):
        require(getattr(call, name).is_contiguous(), f"{name} is not contiguous")
    strides = (call.input_stride, 1)
    require(call.inputs.stride() == strides, f"the strides {strides} are not those of inputs {call.inputs.stride()}")


def _convolved(call: Any, state: torch.Tensor, metadata: RecurrentMetadata) -> torch.Tensor:
    bias = None if call.bias is None else plain(call.bias)
    return _OPS.causal_conv(plain(call.inputs), plain(call.weight), bias, state, metadata, silu=call.HAS_SILU)


def _offsets(metadata: RecurrentMetadata) -> torch.Tensor:
    """Return of each token how many of its sequence come before it in this step."""
    firsts, counts = metadata.cu_seqlens[:-1].long(), metadata.cu_seqlens.diff().long()
    return torch.arange(int(metadata.cu_seqlens[-1])) - firsts.repeat_interleave(counts)


def conv_sequence(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.recurrent.triton.conv.conv_sequence_kernel: a sequence's first tokens, and all writes of states."""
    _check_conv(call)
    num_tokens, channels = call.inputs.shape
    num_slots = check_state(call.state, call.WIDTH - 1, channels)
    metadata = check_batch(call, num_tokens, num_slots)
    wanted = (-(-channels // call.BLOCK), metadata.num_seqs)
    require(tuple(grid) == wanted, f"the grid {grid} is not one program for each of {wanted} blocks and sequences")

    def compute() -> None:
        output = _convolved(call, plain(call.state), metadata)
        tokens = _computed_tokens(metadata)
        tokens = tokens[_offsets(metadata)[tokens] < call.WIDTH - 1]
        plain(call.output)[tokens] = output[tokens]

    return compute


def conv_other_tokens(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.recurrent.triton.conv.conv_other_tokens_kernel: the tokens that need no state."""
    _check_conv(call)
    num_tokens, channels = call.inputs.shape
    require(0 <= call.num_decodes < num_tokens == call.num_tokens, f"{call.num_decodes} of {call.num_tokens} tokens")
    wanted = (-(-(num_tokens - call.num_decodes) // call.TOKENS), -(-channels // call.BLOCK))
    require(tuple(grid) == wanted, f"the grid {grid} does not cover the output, {wanted}")
    require(call.TAPS >= call.WIDTH and call.TAPS & (call.TAPS - 1) == 0, f"TAPS is {call.TAPS}")
    require_tensor("cu_seqlens", call.cu_seqlens, torch.int32, call.num_seqs + 1)
    require_tensor("slots", call.slots, torch.int32, call.num_seqs)
    check_bounds(call.cu_seqlens, num_tokens)
    none = torch.zeros(0, dtype=torch.int32)
    slots = plain(call.slots)
    metadata = RecurrentMetadata(plain(call.cu_seqlens), slots, torch.ones_like(slots), none, none, num_decodes=0)

    def compute() -> None:
        unread = torch.zeros(max(int(slots.max()), 0) + 1, call.WIDTH - 1, channels)
        output = _convolved(call, unread, metadata)
        tokens = _computed_tokens(metadata)
        tokens = tokens[_offsets(metadata)[tokens] >= call.WIDTH - 1]
        plain(call.output)[tokens] = output[tokens]

    return compute


# --- recurrences -----------------------------------------------------------------------------------------------------


def check_heads(name: str, heads: torch.Tensor, stride: int, dtype: torch.dtype, *shape: int) -> None:
    """Check [num_tokens, num_heads, dim] whose heads are contiguous within a token."""
    require_tensor(name, heads, dtype, *shape)
    require(heads.stride(2) == 1, f"{name} is not contiguous in its last dimension")
    require(shape[1] == 1 or heads.stride(1) == shape[2], f"the heads of {name} are not contiguous")
    require(heads.stride(0) == stride, f"{stride} is not the stride of {name}, {heads.stride(0)}")


def _check_blocks(grid: tuple[int, ...], call: Any, padded: str, size: int, block: int, divided: int) -> None:
    """Check that blocks of ``divided`` rows or columns cover them, and that ``padded`` is a power of two from size."""
    whole = getattr(call, padded)
    require(whole >= size and whole & (whole - 1) == 0, f"{padded}={whole} is not a power of two from {size} on")
    require(block & (block - 1) == 0, f"a block of {block} is not a power of two")
    wanted = (-(-divided // block), call.NUM_HEADS, call.slots.shape[0])
    require(tuple(grid) == wanted, f"the grid {grid} is not one program for each of {wanted} blocks")


def delta_rule(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.recurrent.triton.delta_rule.delta_rule_kernel."""
    num_tokens, num_heads, value_dim = call.value.shape
    num_key_heads, key_dim = call.key.shape[1:]
    sizes = (num_heads, num_heads // num_key_heads, key_dim, value_dim)
    constants = (call.NUM_HEADS, call.HEADS_PER_KEY, call.KEY_DIM, call.VALUE_DIM)
    require(constants == sizes and num_heads % num_key_heads == 0, f"constants {constants} are not {sizes}")
    numbers = (call.eps, call.query_scale)
    require(numbers == (_NORM_EPS, key_dim**-0.5), f"eps and query_scale are {numbers}")
    dtype = call.value.dtype
    for name in ("query", "key"):
        stride = getattr(call, f"{name}_stride")
        check_heads(name, getattr(call, name), stride, dtype, num_tokens, num_key_heads, key_dim)
    check_heads("value", call.value, call.value_stride, dtype, num_tokens, num_heads, value_dim)
    require_tensor("output", call.output, dtype, num_tokens, num_heads, value_dim)
    own_decays = (key_dim,) if call.DECAYS_ROWS else ()  # of each row of a state
    require_tensor("decay", call.decay, torch.float32, num_tokens, num_heads, *own_decays)
    require_tensor("beta", call.beta, torch.float32, num_tokens, num_heads)
    for name in ("output", "decay", "beta"):
        require(getattr(call, name).is_contiguous(), f"{name} is not contiguous")
    metadata = check_batch(call, num_tokens, check_state(call.state, num_heads, key_dim, value_dim))
    metadata = _short(metadata, call.max_length)
    _check_blocks(grid, call, "BLOCK_KEY", key_dim, call.BLOCK_VALUE, value_dim)
    parts = [plain(getattr(call, name)) for name in ("query", "key", "value", "decay", "beta")]

    def compute() -> None:
        output, tokens = _OPS.gated_delta_rule(*parts, plain(call.state), metadata), _computed_tokens(metadata)
        plain(call.output)[tokens] = output[tokens]

    return compute


def scan(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.recurrent.triton.scan.scan_kernel."""
    num_tokens, num_heads, head_dim = call.inputs.shape
    num_groups, state_size = call.keys.shape[1:]
    sizes = (num_heads, num_heads // num_groups, head_dim, state_size)
    constants = (call.NUM_HEADS, call.HEADS_PER_GROUP, call.HEAD_DIM, call.STATE_SIZE)
    require(constants == sizes and num_heads % num_groups == 0, f"constants {constants} are not {sizes}")
    dtype = call.inputs.dtype
    check_heads("inputs", call.inputs, call.input_stride, dtype, num_tokens, num_heads, head_dim)
    for name, stride in (("keys", call.key_stride), ("queries", call.query_stride)):
        check_heads(name, getattr(call, name), stride, dtype, num_tokens, num_groups, state_size)
    require_tensor("output", call.output, dtype, num_tokens, num_heads, head_dim)
    require_tensor("steps", call.steps, torch.float32, num_tokens, num_heads)
    for name in ("decay", "skip"):
        require_tensor(name, getattr(call, name), torch.float32, num_heads)
    for name in ("output", "steps", "decay", "skip"):
        require(getattr(call, name).is_contiguous(), f"{name} is not contiguous")
    metadata = check_batch(call, num_tokens, check_state(call.state, num_heads, head_dim, state_size))
    metadata = _short(metadata, call.max_length)
    _check_blocks(grid, call, "BLOCK_STATE", state_size, call.BLOCK_DIM, head_dim)
    parts = [plain(getattr(call, name)) for name in ("inputs", "steps", "decay", "keys", "queries", "skip")]

    def compute() -> None:
        output, tokens = _OPS.selective_scan(*parts, plain(call.state), metadata), _computed_tokens(metadata)
        plain(call.output)[tokens] = output[tokens]

    return compute


CONTRACTS: dict[str, Contract] = {
    "conv_sequence_kernel": conv_sequence,
    "conv_other_tokens_kernel": conv_other_tokens,
    "delta_rule_kernel": delta_rule,
    "scan_kernel": scan,
}
