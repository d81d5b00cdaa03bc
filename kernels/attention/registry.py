"""The table of attention backends. It imports no torch, so that an engine's config can be checked without it.

To add a backend: implement `AttentionBackend` (base.py) in a new module of this folder, and add its line to BACKENDS.
The names that `EngineConfig` accepts, the choice of "auto", the lists in error messages and the GPU checks of
benchmarks/gpu/backends.py follow from the table. Copy the tests of tests/kernels/attention/test_triton_backend.py,
which compare a backend with reference.py.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BACKENDS", "LARGEST_HEAD_DIM", "BackendEntry"]

LARGEST_HEAD_DIM = 256  # that every backend computes

HALF = ("bfloat16", "float16")
ANY = ("float32", *HALF)
_ALL = ("softcap", "sinks", "latent", "chunks", "batch_invariant", "large_heads")
_OF_CPU = ("sparse", "value_dims")
_OF_GPU = ("sparse", "fp8")


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """Where a backend is implemented, and what it computes.

    Attributes:
        module: name in this folder; imported when the backend is chosen, with the libraries that it needs.
        class_name: the subclass of `AttentionBackend`.
        devices: types of devices, as torch names them.
        dtypes: of queries and cache, as torch names them.
        options: of AttentionInputs that it computes beside sliding windows: `softcap`, `sinks`, `latent`, `chunks`, and
            `sparse`, which is `topk_slots`; `batch_invariant`: what a sequence gets has the same bits whatever the rest
            of the batch; `large_heads`: more than LARGEST_HEAD_DIM elements in a head, up to 512; `value_dims`: values
            that have fewer elements than keys; and `fp8`: keys and values in FP8.
    """

    module: str
    class_name: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    options: tuple[str, ...] = ()


BACKENDS: dict[str, BackendEntry] = {  # "auto" takes the first that can run, so the fastest of a device comes first
    "cpu":          BackendEntry("cpu_backend",        "CpuBackend",        ("cpu",),  ANY,  options=(*_ALL, *_OF_CPU)),
    "flash_attn_3": BackendEntry("flash.flash_attn_3", "FlashAttn3Backend", ("cuda",), HALF, options=("softcap",)),
    "flash_attn":   BackendEntry("flash.flash_attn",   "FlashAttnBackend",  ("cuda",), HALF, options=("softcap",)),
    "triton":       BackendEntry("triton.backend",     "TritonBackend",     ("cuda",), ANY,  options=(*_ALL, *_OF_GPU)),
}  # fmt: skip
