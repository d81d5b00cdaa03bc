"""TensorParallel: one rank of a group that shares a model, and the group's collectives.

The scheme is Megatron-LM's (Shoeybi et al., 2019). A layer needs two sums, and a step one more and one gather:

    qkv, gate, up      by columns: every rank computes its own heads and features from the whole input
    o, down            by input features: each rank's output is one addend, and all_reduce sums them
    embedding          by vocabulary: a rank looks up its own ids, other ids give zero, and all_reduce sums
    lm_head            by vocabulary: rank 0 gathers the logits; the others do not need them

The object is passed explicitly. It has its own process group and leaves torch's default one alone. So several engines
can share a process with each other and with other users of torch.distributed. No port is fixed: gloo and NCCL take free
ones and exchange them through a file in a private directory, or through a store of rank 0 for ranks on several hosts.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo, Store, TCPStore

__all__ = ["TensorParallel"]

# For ranks that hang: the death of a rank is noticed at once.
_TIMEOUT = timedelta(seconds=120)
_LOOPBACK = "127.0.0.1"
_TCP = "tcp://"


class TensorParallel:
    """Rank ``rank`` of ``size``; with ``size`` 1 the collectives do nothing."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        assert 0 <= rank < size
        assert (group is not None) == (size > 1)
        self.rank = rank
        self.size = size
        self._group = group

    @classmethod
    def join(cls, rank: int, size: int, device: torch.device, rendezvous: str, host: str = "") -> TensorParallel:
        """Join the other ranks; returns when all have joined.

        Args:
            rank: this one.
            size: the number of ranks.
            device: on which the tensors are.
            rendezvous: a file that all ranks on one host see, or ``tcp://host:port`` of a store for several hosts.
            host: the address of this host, which the others reach; empty: all ranks are on it.
        """
        if size == 1:
            return cls()
        store = _store(rendezvous, size)
        store.set_timeout(_TIMEOUT)
        if device.type == "cuda":
            parallel = cls(rank, size, _nccl_group(store, rank, size))
        else:
            parallel = cls(rank, size, _gloo_group(store, rank, size, host or _LOOPBACK))
        parallel.all_reduce(torch.zeros(1, device=device))  # NCCL connects only now
        return parallel

    def all_reduce(self, addend: torch.Tensor) -> torch.Tensor:
        """Replace the ranks' tensors by their sum, and return it."""
        if self.size > 1:
            self._group.allreduce(addend).wait()
        return addend

    def gather_columns(self, columns: torch.Tensor) -> torch.Tensor | None:
        """Return the ranks' [num_tokens, n] side by side, [num_tokens, size * n], on rank 0, None on the others."""
        if self.size == 1:
            return columns
        parts = [torch.empty_like(columns) for _ in range(self.size)] if self.rank == 0 else []
        self._group.gather(parts, columns, 0).wait()
        return torch.cat(parts, dim=-1) if self.rank == 0 else None

    def abort(self) -> None:
        """Leave the group and abort its running collectives, from any thread; no collective can follow."""
        group, self._group = self._group, None
        if group is not None and group.name() == "nccl":  # gloo's collectives fail by themselves when a peer is gone
            group.abort()


def _store(rendezvous: str, size: int) -> Store:
    if not rendezvous.startswith(_TCP):
        return FileStore(rendezvous, size)
    host, _, port = rendezvous.removeprefix(_TCP).rpartition(":")
    return TCPStore(host, int(port), timeout=_TIMEOUT)


def _gloo_group(store: Store, rank: int, size: int, host: str) -> Any:
    # torch's public constructor would resolve the host's name, which may be another machine's.
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = _TIMEOUT
    return gloo(store, rank, size, options)


def _nccl_group(store: Store, rank: int, size: int) -> Any:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # absent from torch's builds for the CPU

    options = ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    return ProcessGroupNCCL(store, rank, size, options)
