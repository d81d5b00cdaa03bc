"""LaunchLog: which Triton kernels a test launches, by the key under which Triton would compile them for a GPU.

The key is Triton's own: the types of the arguments, the compile-time constants, the launch options, and whether an
integer is 1 or divisible by 16 and a pointer aligned. Kernels are not run, so whether this process interprets or
compiles them does not matter, and outputs keep what they were allocated with.
"""

from __future__ import annotations

from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from kernels import store_kvcache_triton
from kernels.attention import triton_kernels
from kernels.layer_ops import triton_kernels as layer_kernels

KERNELS = (
    triton_kernels.mixed_kernel,
    triton_kernels.split_decode_kernel,
    triton_kernels.reduce_splits_kernel,
    store_kvcache_triton._store_kernel,
    layer_kernels.add_norm_kernel,
    layer_kernels.rotate_and_store_kernel,
    layer_kernels.gated_activation_kernel,
)


class LaunchLog:
    """The variants of our kernels that were launched since it was made, in order of their first launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.variants: dict[str, None] = {}
        for kernel in KERNELS:
            monkeypatch.setattr(kernel, "run", self._recorder(kernel))

    def _recorder(self, kernel: Any) -> Any:
        compiled = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
        backend = make_backend(GPUTarget("cuda", 90, 32))
        bind = create_function_from_signature(compiled.signature, compiled.params, backend)

        def record(*args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
            _, specialization, launch_options = bind(*args, **options)
            names = [parameter.name for parameter in compiled.params]
            arguments = ", ".join(f"{name}: {value}" for name, value in zip(names, specialization, strict=True))
            self.variants[f"{kernel.__name__}({arguments}) {launch_options}"] = None

        return record
