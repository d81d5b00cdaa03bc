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

__all__ = ["MaskBuilder", "apply_bitmask", "fill_bitmask"]


def fill_bitmask(grammars: Sequence[Grammar]) -> torch.Tensor:
    """Return the masks: int32 [len(grammars), ceil(vocab_size / 32)] on the CPU, in pinned memory if there is CUDA.

    Bit ``i % 32`` of word ``i // 32`` is set if token ``i`` may come next.
    """
    assert grammars, "a step without grammars needs no bitmask"
    width = len(grammars[0].vocabulary.eos_bits)
    bitmask = torch.empty((len(grammars), width), dtype=torch.int32, pin_memory=torch.cuda.is_available())
    fill_masks(grammars, bitmask.numpy())
    return bitmask


def apply_bitmask(logits: torch.Tensor, indices: Sequence[int], bitmask: torch.Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf, without a copy.

    Args:
        logits: [num_logits, vocab_size], of any floating type, on any device.
        indices: of the logits that have a grammar, without repetition, in the order of ``bitmask``.
        bitmask: int32 [len(indices), ceil(vocab_size / 32)], on the CPU or the logits' device.
    """
    vocab_size = logits.shape[1]
    assert bitmask.shape == (len(indices), -(-vocab_size // 32))
    assert bitmask.dtype == torch.int32
    if not indices:
        return
    # As bytes in order, since torch supports only little-endian machines.
    octets = bitmask.to(logits.device, non_blocking=True).view(torch.uint8)
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=logits.device)
    forbidden = ((octets[:, :, None] & powers) == 0).flatten(1)[:, :vocab_size]  # [len(indices), vocab_size]
    if list(indices) == list(range(len(logits))):
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        index = torch.tensor(indices, device=logits.device)
        logits.index_copy_(0, index, logits[index].masked_fill_(forbidden, -torch.inf))


class MaskBuilder:
    """Computes a step's bitmask in its own thread, during the forward pass."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-mask")

    def start(self, grammars: Sequence[Grammar]) -> Future[torch.Tensor]:
        """Start ``fill_bitmask(grammars)``. Until the future has its result, only the thread may use the grammars."""
        return self._thread.submit(fill_bitmask, tuple(grammars))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
