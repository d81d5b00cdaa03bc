"""Grammar bitmasks as tensors: the tokens that each sequence may sample, computed while the model runs.

    future = builder.start(grammars)    a thread fills the bitmask      | forward pass
    future.result()                     waits until it is complete      | logits
    apply_bitmask(...)                  -inf for tokens not allowed     | sampling

grammar.py decides which tokens are allowed; the sampler chooses one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from engine.structured_outputs.grammar import Grammar, fill_masks
from kernels.device_copy import to_device, use_device
from kernels.sampling.select import select_sampling_ops

__all__ = ["MaskBuilder", "apply_bitmask", "fill_bitmask", "forbidden_tokens"]


def fill_bitmask(grammars: Sequence[Grammar], *, pinned: bool = False) -> torch.Tensor:
    """Return the masks: int32 [len(grammars), ceil(vocab_size / 32)] on the CPU, in pinned memory for a GPU.

    Bit ``i % 32`` of word ``i // 32`` is set if token ``i`` may come next.
    """
    assert grammars, "a step without grammars needs no bitmask"
    width = len(grammars[0].vocabulary.eos_bits)
    bitmask = torch.empty((len(grammars), width), dtype=torch.int32, pin_memory=pinned)
    fill_masks(grammars, bitmask.numpy())
    return bitmask


def forbidden_tokens(bitmask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return which tokens an int32 bitmask [n, ceil(vocab_size / 32)] does not allow, bool [n, vocab_size]."""
    # As bytes in order, since torch supports only little-endian machines.
    octets = bitmask.view(torch.uint8)
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=bitmask.device)
    return ((octets[:, :, None] & bits) == 0).flatten(1)[:, :vocab_size]


def apply_bitmask(logits: torch.Tensor, indices: Sequence[int], bitmask: torch.Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf.

    Args:
        logits: [num_logits, vocab_size], of any floating type, on any device.
        indices: of the logits that have a grammar, without repetition, in the order of ``bitmask``.
        bitmask: int32 [len(indices), ceil(vocab_size / 32)], on the logits' device or in pinned memory; from other
            memory of the host, the copy waits for the device.
    """
    vocab_size = logits.shape[1]
    assert bitmask.shape == (len(indices), -(-vocab_size // 32))
    assert bitmask.dtype == torch.int32
    if not indices:
        return
    bitmask = bitmask.to(logits.device, non_blocking=True)
    ops = select_sampling_ops(logits.device.type)
    if ops is not None:
        is_whole_batch = list(indices) == list(range(len(logits)))
        ops.apply_bitmask(logits, None if is_whole_batch else to_device(indices, torch.int64, logits.device), bitmask)
        return
    forbidden = forbidden_tokens(bitmask, vocab_size)
    first, end = indices[0], indices[0] + len(indices)
    if list(indices) == list(range(first, end)):
        logits[first:end].masked_fill_(forbidden, -torch.inf)  # in place
    else:
        index = to_device(indices, torch.int64, logits.device)
        logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(forbidden, -torch.inf))


class MaskBuilder:
    """Computes a step's bitmask in its own thread, during the forward pass.

    Args:
        device: of the logits. The bitmasks of a GPU are in pinned memory, which belongs to a GPU's context too.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._thread = ThreadPoolExecutor(1, "grammar-mask", initializer=use_device, initargs=(device,))

    def start(self, grammars: Sequence[Grammar]) -> Future[torch.Tensor]:
        """Start ``fill_bitmask(grammars)``. Until the future has its result, only the thread may use the grammars."""
        return self._thread.submit(fill_bitmask, tuple(grammars), pinned=self._pinned)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
