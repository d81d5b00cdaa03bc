"""flash-attn's two functions on tensors of the simulated GPU: its rules, then the plain torch of the kernel tests."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.gpu_rehearsal.device_tensor import DeviceTensor
from tests.gpu_rehearsal.kernel_contracts import plain, require
from tests.gpu_rehearsal.machine import Machine
from tests.kernels.attention import fake_flash_attn

__all__ = ["make_module"]

_HALF = (torch.float16, torch.bfloat16)


def make_module(machine: Machine) -> ModuleType:
    """Return a module to be put into `sys.modules` as ``flash_attn``."""

    def call(name: str, q: Any, k: Any, v: Any, options: dict[str, Any]) -> DeviceTensor:
        _check(machine, [q, k, v, *(one for one in options.values() if isinstance(one, torch.Tensor))])
        require(q.dtype in _HALF and k.dtype == v.dtype == q.dtype, "FlashAttention only supports fp16 and bf16")
        require(all(one.stride(-1) == 1 for one in (q, k, v)), "the last dimension must be contiguous")
        require(q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, f"head dimension {q.shape[-1]}")
        machine.launch(q.device.index)
        on_host = {key: plain(one) if isinstance(one, torch.Tensor) else one for key, one in options.items()}
        with _disable_current_modes():
            attended = getattr(fake_flash_attn, name)(plain(q), plain(k), plain(v), **on_host)
        return DeviceTensor(attended, q.device)

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = lambda q, k, v, **options: call(  # type: ignore[attr-defined]
        "flash_attn_varlen_func", q, k, v, options
    )
    module.flash_attn_with_kvcache = lambda q, k, v, **options: call(  # type: ignore[attr-defined]
        "flash_attn_with_kvcache", q, k, v, options
    )
    return module


def _check(machine: Machine, tensors: list[Any]) -> None:
    for tensor in tensors:
        require(isinstance(tensor, DeviceTensor), f"flash-attn got a tensor on the {tensor.device}")
        require(tensor.device.index == machine.current_device, f"{tensor.device} is not the current device")
