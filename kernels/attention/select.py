"""select_backend: chooses an engine's attention backend once, at start, from its device, its dtype and its config.

registry.py lists the backends and says how to add one. A backend is imported only when it is chosen, so a CPU needs
neither Triton nor flash-attn.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

import torch

from kernels.attention.base import AttentionBackend
from kernels.attention.registry import BACKENDS

__all__ = ["select_backend"]


def select_backend(
    device: torch.device, dtype: torch.dtype, name: str = "auto", options: frozenset[str] = frozenset()
) -> AttentionBackend:
    """Return the backend called `name`, or with "auto" the fastest that can compute `dtype` on `device`.

    `options` are those of registry.py that the model or the config needs.

    Raises ValueError for an unknown name, and for a backend that cannot run on this device, with this dtype or these
    options, or on this installation.
    """
    if name == "auto":
        return _fastest_backend(device, dtype, options)
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; choose {_listed(['auto', *BACKENDS])}")
    try:
        backend = _create(name, device, dtype, options)
    except _UnusableError as error:
        choices = _listed(["auto", *(other for other in _candidates(device, dtype, options) if other != name)])
        problem = f"attention backend {name!r} cannot run on device {str(device)!r}: {error}"
        raise ValueError(f"{problem}; use {choices}") from error
    backend.why_chosen = "configured"
    return backend


class _UnusableError(Exception):
    """A backend cannot run here; the message is the reason."""


def _fastest_backend(device: torch.device, dtype: torch.dtype, options: frozenset[str]) -> AttentionBackend:
    reasons = []
    for name in _candidates(device, dtype, options):
        try:
            backend = _create(name, device, dtype, options)
        except _UnusableError as error:
            reasons.append(f"{name}: {error}")
            continue
        backend.why_chosen = "; ".join([f"the fastest for {_dtype_name(dtype)} here", *reasons])
        return backend
    details = "; ".join(reasons) or _remedy(device, options)
    wanted = " with ".join([_dtype_name(dtype), *sorted(options)])
    raise ValueError(f"no attention backend computes {wanted} on device {str(device)!r}; {details}")


def _remedy(device: torch.device, options: frozenset[str]) -> str:
    """Return what to change if no line of the table has the device, the dtype and the options."""
    usable = [entry for entry in BACKENDS.values() if options <= set(entry.options)]
    if dtypes := {name: None for entry in usable if device.type in entry.devices for name in entry.dtypes}:
        return f"choose the dtype {_listed(dtypes)}"
    return f"use a {_listed({name: None for entry in usable for name in entry.devices})} device"


def _candidates(device: torch.device, dtype: torch.dtype, options: frozenset[str]) -> list[str]:
    """Return the backends whose line of the table has this device, this dtype and these options."""
    return [
        name
        for name, entry in BACKENDS.items()
        if device.type in entry.devices and _dtype_name(dtype) in entry.dtypes and options <= set(entry.options)
    ]


def _create(name: str, device: torch.device, dtype: torch.dtype, options: frozenset[str]) -> AttentionBackend:
    entry = BACKENDS[name]
    try:
        module = import_module(f"kernels.attention.{entry.module}")
        backend_class: type[AttentionBackend] = getattr(module, entry.class_name)
        if reason := backend_class.why_unusable(device):
            raise _UnusableError(reason)
        if _dtype_name(dtype) not in entry.dtypes:
            raise _UnusableError(f"it computes {_listed(entry.dtypes)}, not {_dtype_name(dtype)}")
        if missing := options - set(entry.options):
            raise _UnusableError(f"it does not compute {_listed(sorted(missing))}, which the model or the config needs")
        return backend_class()
    except ImportError as error:  # also raised by a wheel built against another torch: installed, yet unusable
        raise _UnusableError(f"a library that it needs cannot be imported ({error})") from error


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: Iterable[str]) -> str:
    """Return "a, b or c"."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
