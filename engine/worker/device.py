"""The device and the CPU threads of one rank."""

from __future__ import annotations

import os
from contextlib import suppress

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from kernels.cgroup import available_cpus
from kernels.cpu.library import set_num_threads
from kernels.home import home_for

__all__ = ["default_num_threads", "resolve_device", "set_rank_threads"]

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is torch's older name
_TRITON_VARIABLES = ("TRITON_HOME", "TRITON_CACHE_DIR")


def resolve_device(config: EngineConfig, rank: int | None) -> torch.device:
    """Return a rank's device: ``auto`` is a GPU if there is one, and each rank has a GPU of its own.

    ``rank`` is its number among those that share this host's GPUs; None: no other rank runs on this host.

    A GPU always has an index, because ``torch.cuda.set_device`` refuses a device without one. ``cuda`` alone is the
    calling thread's current GPU. The first call for a GPU also configures torch's allocator: see below.

    Raises:
        ConfigError: if the config asks for GPUs and there are none, fewer than ranks, or not the one that it names.
    """
    name, size = config.device, 1 if rank is None else config.tensor_parallel_size
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device='{name}' asks for a GPU, but torch {torch.__version__} sees none; choose auto or cpu, or install "
            "torch's CUDA build and a driver that fits it (580 or newer for CUDA 13)"
        )
    if size > torch.cuda.device_count():
        raise ConfigError(f"tensor_parallel_size={size} exceeds the {torch.cuda.device_count()} GPUs here; lower it")
    _use_expandable_segments()
    _choose_triton_home()
    if rank is not None and size > 1:
        return torch.device("cuda", rank)
    index = torch.device("cuda" if name == "auto" else name).index
    if index is not None and index >= torch.cuda.device_count():
        raise ConfigError(f"device='{name}' does not exist: the last GPU here is cuda:{torch.cuda.device_count() - 1}")
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def _use_expandable_segments() -> None:
    """Let torch's CUDA allocator grow its segments, so that the KV cache does not fail for fragments of the warm-up.

    Torch reads the environment when CUDA is initialised: ``torch.cuda.is_available`` does not do that, and
    ``torch.cuda.current_device`` does. A user's own setting stays; so ``PYTORCH_ALLOC_CONF=expandable_segments:False``
    turns this off, for virtual GPUs that cannot map memory.
    """
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _choose_triton_home() -> None:
    """Let Triton keep compiled kernels in a private directory if the user has no home directory that can be written.

    Triton would make a directory that is called ``~`` in the working directory, or fail.
    """
    if any(name in os.environ for name in _TRITON_VARIABLES):
        return
    with suppress(OSError):  # there is no such directory either: Triton says so
        home = home_for(".triton/cache")
        if str(home) != os.path.expanduser("~"):
            os.environ["TRITON_HOME"] = str(home)


def default_num_threads() -> int:
    """Return how many threads an engine computes with on a CPU without ``num_threads``.

    ``OMP_NUM_THREADS`` says it, else there is one for each core, but no more than the CPUs that this process may use.
    Torch follows the variable and the affinity, and does not know of a container's quota.
    """
    threads = torch.get_num_threads()
    return threads if os.environ.get("OMP_NUM_THREADS") else min(threads, available_cpus())


def set_rank_threads(config: EngineConfig, rank: int, *, has_cpu_kernels: bool, owns_host: bool = False) -> None:
    """Limit torch and the CPU kernels to this rank's share of the host's threads: all if it ``owns_host``.

    Without ``num_threads``, the ranks other than 0 start with their share already: see ``RemoteRanks``.
    """
    threads = config.num_threads or default_num_threads()
    if threads < torch.get_num_threads():  # which knows no quota
        torch.set_num_threads(threads)
    if not owns_host and (config.num_threads is not None or rank == 0):
        threads = max(1, threads // config.tensor_parallel_size)
    if config.num_threads is not None:
        torch.set_num_threads(threads)
    if has_cpu_kernels:
        set_num_threads(threads)
