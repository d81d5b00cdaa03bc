"""select_backend: chooses an engine's attention backend once, at start, from the device and the configured name.

Backends are imported only when they are chosen, so a CPU needs neither Triton nor flash-attn.
"""

from __future__ import annotations

import importlib.util

import torch

from kernels.attention.base import AttentionBackend

_FIRST_CAPABILITY_OF_FLASH_ATTN = (8, 0)  # Ampere: FlashAttention-2 supports nothing older


def select_backend(device: torch.device, name: str = "auto") -> AttentionBackend:
    """Return the backend called `name` ("cpu", "triton", "flash_attn"), or with "auto" the fastest usable on `device`.

    Raises ValueError for an unknown name, and for a backend that cannot run on this device or this installation.
    """
    chosen = _fastest_backend(device) if name == "auto" else name
    match chosen:
        case "cpu":
            return _cpu_backend(device)
        case "triton":
            return _triton_backend(device)
        case "flash_attn":
            return _flash_attn_backend(device)
        case _:
            raise ValueError(f"unknown attention backend {name!r}; choose auto, cpu, triton or flash_attn")


def _fastest_backend(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise ValueError(f"no attention backend runs on device {str(device)!r}; use a cpu or cuda device")
    return "triton" if _why_no_flash_attn(device) else "flash_attn"


def _cpu_backend(device: torch.device) -> AttentionBackend:
    if device.type != "cpu":
        raise ValueError(
            f"attention backend 'cpu' cannot run on device {str(device)!r}; use auto, triton or flash_attn"
        )
    from kernels.attention.cpu_backend import CpuBackend

    return CpuBackend()


def _triton_backend(device: torch.device) -> AttentionBackend:
    if importlib.util.find_spec("triton") is None:
        raise ValueError("attention backend 'triton' needs the triton package; install it, or use auto or cpu")
    from triton import knobs

    if device.type != "cuda" and not knobs.runtime.interpret:
        raise ValueError(
            f"attention backend 'triton' cannot run on device {str(device)!r}; "
            "use auto or cpu, or set TRITON_INTERPRET=1 to test its kernels"
        )
    from kernels.attention.triton_backend import TritonBackend

    return TritonBackend()


def _flash_attn_backend(device: torch.device) -> AttentionBackend:
    if reason := _why_no_flash_attn(device):
        remedy = "auto or cpu" if device.type == "cpu" else "auto or triton"
        raise ValueError(f"attention backend 'flash_attn' cannot run on device {str(device)!r}: {reason}; use {remedy}")
    from kernels.attention.flash_attn_backend import FlashAttnBackend

    return FlashAttnBackend()


def _why_no_flash_attn(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "it needs a CUDA device"
    if torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY_OF_FLASH_ATTN:
        return "it needs a GPU of compute capability 8.0 or newer"
    try:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: F401
    except ImportError as error:  # also raised by a wheel built against another torch: installed, yet unusable
        return f"flash-attn cannot be imported ({error})"
    return None
