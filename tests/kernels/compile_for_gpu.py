"""Compile, without a GPU, every kernel that the Triton backend launches; run as a script with a compute capability.

The interpreter accepts what the compiler refuses. Here the backend runs as always, on a driver that claims to be a GPU,
and each launch stops when its machine code is there. Prints one line a kernel: its name and the size of that code.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from kernels.attention import triton_kernels
from kernels.attention.triton_backend import TritonBackend
from kernels.store_kvcache_triton import _store_kernel, store_kvcache_triton
from tests.kernels.attention.paged_batches import BATCHES, Shape, make_batch


class _Driver:
    """The driver methods that Triton calls before a launch."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _stop_before_launch(kernel: Any) -> None:
    run = kernel.run

    def compile_only(*arguments: Any, warmup: bool, **options: Any) -> None:
        compiled = run(*arguments, warmup=True, **options)
        print(kernel.__name__, len(compiled.asm["cubin"]))

    kernel.run = compile_only


def main(capability: int) -> None:
    triton.runtime.driver.set_active(_Driver(capability))
    names = ("mixed_kernel", "split_decode_kernel", "reduce_splits_kernel")
    for kernel in (*(getattr(triton_kernels, name) for name in names), _store_kernel):
        _stop_before_launch(kernel)
    shape = Shape(num_heads=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    for lengths in (BATCHES["mixed"], [(1, 1000)]):
        for sliding_window in (None, 600):
            batch = make_batch(lengths, shape)
            batch.run(TritonBackend(), sliding_window)
    key = torch.zeros(1, 8, 128, dtype=torch.bfloat16)
    store_kvcache_triton(key, key, batch.key_cache, batch.value_cache, batch.metadata.slot_mapping)


if __name__ == "__main__":
    main(int(sys.argv[1]))
