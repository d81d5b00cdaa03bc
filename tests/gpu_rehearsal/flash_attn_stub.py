"""The functions of the flash-attn packages on the simulated GPU: their rules, then the plain torch of the tests."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.gpu_rehearsal.device_tensor import DeviceTensor
from tests.gpu_rehearsal.kernel_contracts import plain, require
from tests.gpu_rehearsal.machine import Machine
from tests.kernels.attention import fake_flash_attn, fake_flash_attn_3

__all__ = ["MODULES", "make_module"]

_HALF = (torch.float16, torch.bfloat16)


MODULES: dict[str, tuple[Any, tuple[str, ...]]] = {  # by the name of their package's module: the functions in torch
    "flash_attn": (fake_flash_attn, ("flash_attn_varlen_func", "flash_attn_with_kvcache")),
    "flash_attn_interface": (fake_flash_attn_3, ("flash_attn_with_kvcache",)),
}


def make_module(machine: Machine, name: str) -> ModuleType:
    """Return a module to be put into `sys.modules` under its name."""
    in_torch, functions = MODULES[name]

    def on_gpu(compute: Any) -> Any:
        def call(q: Any, k: Any, v: Any, **options: Any) -> DeviceTensor:
            _check(machine, [q, k, v, *(option for option in options.values() if isinstance(option, torch.Tensor))])
            require(q.dtype in _HALF and k.dtype == v.dtype == q.dtype, "FlashAttention only supports fp16 and bf16")
            require(all(item.stride(-1) == 1 for item in (q, k, v)), "the last dimension must be contiguous")
            require(q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, f"head dimension {q.shape[-1]}")
            machine.launch(q.device.index)
            on_host = {key: plain(item) if isinstance(item, torch.Tensor) else item for key, item in options.items()}

            def attend() -> torch.Tensor:
                with _disable_current_modes():
                    attended: torch.Tensor = compute(plain(q), plain(k), plain(v), **on_host)
                    return attended

            attended = attend()
            if machine.captured is not None:
                machine.captured.results.append(attended)
                machine.captured.launches.append(lambda: attended.copy_(attend()))
            return DeviceTensor(attended, q.device)

        return call

    module = ModuleType(name)
    for function in functions:
        setattr(module, function, on_gpu(getattr(in_torch, function)))
    return module


def _check(machine: Machine, tensors: list[Any]) -> None:
    for tensor in tensors:
        require(isinstance(tensor, DeviceTensor), f"flash-attn got a tensor on the {tensor.device}")
        require(tensor.device.index == machine.current_device, f"{tensor.device} is not the current device")
