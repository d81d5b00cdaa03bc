"""LaunchLog: which Triton kernels a test launches, by the key under which Triton would compile them for a GPU.

The key is Triton's own: the types of the arguments, the compile-time constants, the launch options, and whether an
integer is 1 or divisible by 16 and a pointer aligned. Kernels are not run, so whether this process interprets or
compiles them does not matter, and outputs keep what they were allocated with.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from kernels.attention.triton import decode, prefill
from kernels.attention.triton import indexer as indexer_triton
from kernels.attention.triton import sparse as sparse_triton
from kernels.attention.triton import split_choice as split_choice_triton
from kernels.cache.triton import pages as pages_triton
from kernels.cache.triton import pending_tokens as pending_tokens_triton
from kernels.cache.triton import store_kvcache as store_kvcache_triton
from kernels.experts.triton import coded_experts as coded_experts_triton
from kernels.experts.triton import experts as experts_triton
from kernels.experts.triton import routing as experts_routing_triton
from kernels.layer_ops.triton import kernels as layer_kernels
from kernels.layer_ops.triton import latents as latent_kernels
from kernels.linear import coded_decode as coded_decode_triton
from kernels.linear import coded_triton as coded_linear_triton
from kernels.linear import fp8_triton as fp8_linear_triton
from kernels.linear import triton as linear_triton
from kernels.recurrent.triton import chunked_delta_rule as chunked_delta_rule_kernels
from kernels.recurrent.triton import chunked_row_decays as row_decays_kernels
from kernels.recurrent.triton import chunked_scan as chunked_scan_kernels
from kernels.recurrent.triton import conv as conv_kernels
from kernels.recurrent.triton import delta_rule as delta_rule_kernels
from kernels.recurrent.triton import scan as scan_kernels
from kernels.recurrent.triton import states as state_kernels
from kernels.sampling.triton import filters as filter_kernels
from kernels.sampling.triton import kernels as sampling_kernels
from kernels.sampling.triton import truncation as truncation_kernels

__all__ = ["KERNELS", "LaunchLog"]

_MODULES: tuple[ModuleType, ...] = (
    *(prefill, decode, indexer_triton, split_choice_triton, sparse_triton),
    *(store_kvcache_triton, pending_tokens_triton, pages_triton),
    *(
        conv_kernels,
        delta_rule_kernels,
        scan_kernels,
        chunked_delta_rule_kernels,
        chunked_scan_kernels,
        row_decays_kernels,
        state_kernels,
    ),
    *(experts_routing_triton, experts_triton, coded_experts_triton),
    *(linear_triton, coded_linear_triton, coded_decode_triton, fp8_linear_triton),
    *(layer_kernels, latent_kernels, filter_kernels, sampling_kernels, truncation_kernels),
)
KERNELS: tuple[Any, ...] = tuple(
    kernel for module in _MODULES for name, kernel in vars(module).items() if name.endswith("_kernel")
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
