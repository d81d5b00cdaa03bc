"""select_linear_method: chooses how linear layers are computed, from their device and dtype and the engine's config.

registry.py lists the methods and says how to add one. A method is imported only when it is chosen.
"""

from __future__ import annotations

from importlib import import_module

import torch

from kernels.linear.base import LinearMethod
from kernels.linear.registry import LINEAR_METHODS, LinearEntry

__all__ = ["select_linear_method"]


def select_linear_method(
    device: torch.device,
    dtype: torch.dtype,
    quantization: str | None = None,
    options: frozenset[str] = frozenset(),
    *,
    may_pack: bool = True,
) -> LinearMethod:
    """Return the first method of the table that can keep weights of ``dtype`` on ``device``.

    Args:
        device: of the weights.
        dtype: of the weights as they are loaded.
        quantization: the engine's option.
        options: those of registry.py that the model or the config needs.
        may_pack: whether the C kernels may compute it.

    Raises:
        ValueError: if no method can, with the reason for each that the table has for this device and quantization.
    """
    reasons: list[str] = []
    for name, entry in LINEAR_METHODS.items():
        if device.type not in entry.devices or entry.quantization != quantization:
            continue
        reason = _why_not(entry, dtype, options, may_pack) or _class_of(entry).why_unusable()
        if reason is None:
            method = _class_of(entry)(dtype)
            method.why_chosen = "; ".join([f"the fastest for {_name(dtype)} here", *reasons])
            return method
        reasons.append(f"{name}: {reason}")
    raise ValueError(f"no linear method computes {_name(dtype)} on device {str(device)!r}; {'; '.join(reasons)}")


def _why_not(entry: LinearEntry, dtype: torch.dtype, options: frozenset[str], may_pack: bool) -> str | None:
    """Return why the entry's line of the table excludes it; None if it does not."""
    if _name(dtype) not in entry.dtypes:
        return f"it does not compute {_name(dtype)}"
    if missing := options - set(entry.options):
        return f"it lacks {' and '.join(sorted(missing))}"
    if entry.packed and not may_pack:
        return "the C kernels do not compute this model"
    return None


def _class_of(entry: LinearEntry) -> type[LinearMethod]:
    method: type[LinearMethod] = getattr(import_module(f"kernels.linear.{entry.module}"), entry.class_name)
    return method


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
