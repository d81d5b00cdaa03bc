"""Launches of the kernels that compute prompts in chunks, with the sizes of chunks, tiles and programs.

Every launch parameter follows from shapes; which sequences of a step are computed here, the kernels find in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from triton import knobs

from kernels.recurrent.triton.chunked_delta_rule import delta_rule_chunks_kernel
from kernels.recurrent.triton.chunked_row_decays import row_decays_chunks_kernel
from kernels.recurrent.triton.chunked_scan import scan_chunks_kernel
from kernels.recurrent.triton.states import carry_states_kernel
from kernels.recurrent_metadata import RecurrentMetadata

__all__ = [
    "MAX_SHORT",
    "NORM_EPS",
    "Tuning",
    "delta_rule_of_prompts",
    "row_decays_of_prompts",
    "scan_of_prompts",
    "token_stride",
]

MAX_SHORT = 16  # tokens of a step's sequence that take less time one by one than a chunk takes
NORM_EPS = 1e-6  # added to the squares' sum of a query or key of the delta rule
_LEAST = 16  # rows or columns of a matrix that is multiplied


@dataclass(frozen=True)
class Tuning:
    """Sizes of the kernels of prompts.

    Attributes:
        chunk: tokens of a chunk; a power of two, at least 16.
        block: columns of a state in one program; likewise.
        num_warps, num_stages: of the programs that carry states.
        chunk_warps: of the programs that compute a chunk on its own.

    Raises:
        ValueError: for one stage with four warps. ptxas 12.8 of Triton 3.6 and 3.7 compiles them wrongly for Hopper: a
            matrix in shared memory is then addressed by a register that nothing has set.
    """

    chunk: int = 64
    block: int = 32
    num_warps: int = 8
    num_stages: int = 2
    chunk_warps: int = 4

    def __post_init__(self) -> None:
        if self.num_stages == 1 and self.num_warps <= 4:
            raise ValueError(
                f"num_stages=1 with num_warps={self.num_warps} is compiled wrongly for Hopper by ptxas 12.8; "
                "take two stages, or eight warps"
            )

    @classmethod
    def of(cls, kind: Literal["delta_rule", "row_decays", "scan"], key_dim: int, dtype: torch.dtype) -> Tuning:
        """Return sizes for keys of ``key_dim`` elements, with which the kernels spill no registers.

        Those of Hopper were the fastest on an H200.
        """
        capability = 90 if knobs.runtime.interpret else triton.runtime.driver.active.get_current_target().arch
        is_hopper = 90 <= capability < 100
        if kind == "row_decays":
            return cls(chunk=32, chunk_warps=4 if is_hopper else 8)
        # From 120 on, GPUs have the tensor instructions of those before Hopper.
        if _padded(key_dim) > 128 or dtype == torch.float32 or not 90 <= capability < 120:
            return cls(chunk=32)
        return cls(num_warps=4, num_stages=3) if is_hopper else cls()


def delta_rule_of_prompts(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    metadata: RecurrentMetadata,
    tuning: Tuning | None = None,
) -> None:
    """Compute ``RecurrentOps.gated_delta_rule`` for the sequences of more than MAX_SHORT tokens."""
    (num_tokens, num_key_heads, key_dim), (_, num_heads, _) = key.shape, value.shape
    tuning = tuning or Tuning.of("delta_rule", key_dim, value.dtype)
    solutions, scores = value.new_empty((2, num_tokens, num_heads, tuning.chunk)).unbind()
    scales = decay.new_empty((num_tokens, num_heads, 3))
    num_programs, num_chunks = _chunks(metadata, num_tokens, tuning)
    kept = decay.new_empty((num_chunks, num_heads))
    delta_rule_chunks_kernel[num_programs, num_heads](
        *(solutions, scores, scales, kept, query, key, decay, beta),
        *_chunked_batch(metadata),
        *map(token_stride, (query, key)),
        NORM_EPS,
        key_dim**-0.5,
        NUM_HEADS=num_heads,
        HEADS_PER_KEY=num_heads // num_key_heads,
        KEY_DIM=key_dim,
        BLOCK_KEY=_padded(key_dim),
        CHUNK=tuning.chunk,
        num_warps=tuning.chunk_warps,
        enable_fp_fusion=True,
        SUM_DTYPE=_sum_dtype(value.dtype),
        **_arithmetic(value.dtype),
    )
    _carry(output, query, (key, None), value, (solutions, scores, scales, kept), state, metadata, tuning)


def row_decays_of_prompts(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    metadata: RecurrentMetadata,
    tuning: Tuning | None = None,
) -> None:
    """Compute the same for decays of each row of a state, [num_tokens, num_heads, key_dim]."""
    (num_tokens, num_key_heads, key_dim), (_, num_heads, _) = key.shape, value.shape
    tuning = tuning or Tuning.of("row_decays", key_dim, value.dtype)
    solutions, scores = value.new_empty((2, num_tokens, num_heads, tuning.chunk)).unbind()
    scaled_query, *scaled_keys = value.new_empty((3, num_tokens, num_heads, key_dim)).unbind()
    num_programs, num_chunks = _chunks(metadata, num_tokens, tuning)
    kept = decay.new_empty((num_chunks, num_heads, key_dim))
    row_decays_chunks_kernel[num_programs, num_heads](
        *(solutions, scores, scaled_query, *scaled_keys, kept, query, key, decay, beta),
        *_chunked_batch(metadata),
        *map(token_stride, (query, key)),
        NORM_EPS,
        key_dim**-0.5,
        NUM_HEADS=num_heads,
        HEADS_PER_KEY=num_heads // num_key_heads,
        KEY_DIM=key_dim,
        BLOCK_KEY=_padded(key_dim),
        CHUNK=tuning.chunk,
        num_warps=tuning.chunk_warps,
        enable_fp_fusion=True,
        **_arithmetic(value.dtype),
    )
    of_chunks = (solutions, scores, None, kept)
    _carry(output, scaled_query, (scaled_keys[0], scaled_keys[1]), value, of_chunks, state, metadata, tuning)


def scan_of_prompts(
    output: torch.Tensor,
    inputs: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    keys: torch.Tensor,
    queries: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    metadata: RecurrentMetadata,
    tuning: Tuning | None = None,
) -> None:
    """Compute ``RecurrentOps.selective_scan`` for the sequences of more than MAX_SHORT tokens."""
    (num_tokens, num_heads, _), (_, num_groups, state_size) = inputs.shape, keys.shape
    tuning = tuning or Tuning.of("scan", state_size, inputs.dtype)
    scores = inputs.new_empty((num_tokens, num_heads, tuning.chunk))
    scales = steps.new_empty((num_tokens, num_heads, 2))
    num_programs, num_chunks = _chunks(metadata, num_tokens, tuning)
    kept = steps.new_empty((num_chunks, num_heads))
    scan_chunks_kernel[num_programs, num_heads](
        *(scores, scales, kept, steps, decay, keys, queries, skip),
        *_chunked_batch(metadata),
        *map(token_stride, (keys, queries)),
        NUM_HEADS=num_heads,
        HEADS_PER_GROUP=num_heads // num_groups,
        STATE_SIZE=state_size,
        BLOCK_STATE=_padded(state_size),
        CHUNK=tuning.chunk,
        num_warps=tuning.chunk_warps,
        enable_fp_fusion=True,
        SUM_DTYPE=_sum_dtype(inputs.dtype),
        **_arithmetic(inputs.dtype),
    )
    _carry(output, queries, (keys, None), inputs, (None, scores, scales, kept), state, metadata, tuning)


def _carry(
    output: torch.Tensor,
    query: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor | None],
    value: torch.Tensor,
    of_chunks: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor],
    state: torch.Tensor,
    metadata: RecurrentMetadata,
    tuning: Tuning,
) -> None:
    """Launch what carries the states.

    Args:
        keys: that write the state, and that read it if they are others.
        of_chunks: T, P, scales and kept, as the kernels of chunks write them.
    """
    (_, num_key_heads, key_dim), (_, num_heads, value_dim) = query.shape, value.shape
    block_value = min(_padded(value_dim), tuning.block)
    carry_states_kernel[triton.cdiv(value_dim, block_value), num_heads, metadata.num_seqs - metadata.num_decodes](
        *(output, query, *keys, value, *of_chunks, state),
        *(metadata.cu_seqlens, metadata.slots, metadata.starts, metadata.save_tokens, metadata.save_slots),
        *(metadata.save_tokens.shape[0], metadata.num_decodes, MAX_SHORT),
        *map(token_stride, (query, keys[0], value)),
        NUM_HEADS=num_heads,
        HEADS_PER_KEY=num_heads // num_key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_KEY=_padded(key_dim),
        BLOCK_VALUE=block_value,
        CHUNK=tuning.chunk,
        TRANSPOSED=of_chunks[0] is None,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        enable_fp_fusion=True,
        **_arithmetic(value.dtype),
    )


def token_stride(heads: torch.Tensor) -> int:
    """Return the elements from one token to the next of ``heads`` [num_tokens, num_heads, dim]."""
    assert heads.stride(2) == 1
    assert heads.shape[1] == 1 or heads.stride(1) == heads.shape[2]
    return heads.stride(0)


def _chunks(metadata: RecurrentMetadata, num_tokens: int, tuning: Tuning) -> tuple[int, int]:
    """Return the number of programs that find all chunks, and one that exceeds the index of each by two at least."""
    num_chunks = num_tokens // tuning.chunk + metadata.num_seqs + metadata.save_tokens.shape[0]
    return num_chunks - metadata.num_decodes // tuning.chunk - metadata.num_decodes, num_chunks + 1


def _chunked_batch(metadata: RecurrentMetadata) -> tuple[torch.Tensor | int, ...]:
    """Return what the kernels of chunks take of a step, in their order."""
    saves = metadata.save_tokens, metadata.save_tokens.shape[0]
    return metadata.cu_seqlens, metadata.slots, *saves, metadata.num_seqs, metadata.num_decodes, MAX_SHORT


def _arithmetic(dtype: torch.dtype) -> dict[str, Any]:
    """Return how matrices of tokens in ``dtype`` are multiplied; three products in TF32 give one of float32."""
    match dtype:
        case torch.bfloat16:
            return {"DTYPE": tl.bfloat16, "PRECISION": "tf32"}
        case torch.float16:
            return {"DTYPE": tl.float16, "PRECISION": "tf32"}
    return {"DTYPE": tl.float32, "PRECISION": "tf32x3"}


def _sum_dtype(dtype: torch.dtype) -> Any:
    """Return the dtype in which decays are added: float32 is enough for what is rounded later."""
    return tl.float64 if dtype == torch.float32 else tl.float32


def _padded(size: int) -> int:
    padded: int = triton.next_power_of_2(size)
    return max(padded, _LEAST)
