"""How much shared memory a GPU gives one program of a kernel."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["has_large_shared_memory"]

_LARGE = 160 * 1024  # as GPUs for data centres give, since Ampere; those for consumers give 99 KB


@cache
def has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program may take 160 KB; on a CPU, whose memory the interpreter uses, it may."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return bool(properties.shared_memory_per_block_optin >= _LARGE)  # type: ignore[attr-defined]
