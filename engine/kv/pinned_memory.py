"""Page-locked host memory of exactly the size that is asked for; torch's own allocator rounds up to a power of two.

A GPU copies from and to it without waiting for the CPU. Torch asks CUDA what a pointer is, so a tensor here is pinned
for torch too, although another allocator made it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from kernels.cpu.memory import huge_zeros

__all__ = ["pin", "pinned_zeros", "unpin"]

_PAGE = 2 * 2**20  # at least a whole page, so that no other object shares a page with the tensor


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in page-locked memory. Call ``unpin`` before the tensor is freed.

    Raises:
        RuntimeError: if the system refuses the memory, or CUDA refuses to lock it.
    """
    num_elements = torch.Size(shape).numel()
    memory = pin(huge_zeros((max(num_elements * dtype.itemsize, _PAGE),), torch.uint8))
    return memory[: num_elements * dtype.itemsize].view(dtype).view(shape)


def pin(memory: torch.Tensor) -> torch.Tensor:
    """Lock memory that is contiguous and shares no page with another object; return it. ``unpin`` unlocks it.

    Raises:
        RuntimeError: if CUDA refuses.
    """
    cudart = _cudart()
    error = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)  # 0: cudaHostRegisterDefault
    if int(error):
        raise RuntimeError(f"cudaHostRegister: {cudart.cudaGetErrorString(error)}")
    return memory


def unpin(memory: torch.Tensor, device: torch.device) -> None:
    """Unlock the memory of ``pinned_zeros`` or ``pin`` after the copies that are still queued on ``device``."""
    with suppress(RuntimeError):  # a failed kernel makes every later call fail
        torch.cuda.synchronize(device)
    with suppress(RuntimeError):  # a forked copy of this process has no CUDA
        _cudart().cudaHostUnregister(memory.data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
