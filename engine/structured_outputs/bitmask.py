"""The grammars' share of a step, in tensors: which tokens each row may sample, computed while the model runs.

    future = builder.start(grammars)    a thread fills the bitmask      | the forward pass
    future.result()                     waits for what is left of it    | logits
    apply_bitmask(...)                  -inf on what is not allowed     | sampling

It knows nothing of how a grammar decides (grammar.py) nor of how a token is drawn (sampler.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from engine.structured_outputs.grammar import Grammar, fill_rows

__all__ = ["MaskBuilder", "apply_bitmask", "fill_bitmask"]


def fill_bitmask(grammars: Sequence[Grammar]) -> torch.Tensor:
    """Return int32 [len(grammars), ceil(vocab_size / 32)] on the CPU (pinned where there is a GPU).

    Bit ``i % 32`` of word ``i // 32`` says whether token ``i`` may come next.
    """
    assert grammars, "a step without grammars needs no bitmask"
    width = len(grammars[0].vocabulary.eos_bits)
    bitmask = torch.empty((len(grammars), width), dtype=torch.int32, pin_memory=torch.cuda.is_available())
    fill_rows(grammars, bitmask.numpy())
    return bitmask


def apply_bitmask(logits: torch.Tensor, rows: Sequence[int], bitmask: torch.Tensor) -> None:
    """Set what is not allowed to -inf, in place.

    Args:
        logits: [num_rows, vocab_size], of any floating type, on any device.
        rows: the rows of ``logits`` that have a grammar, without repetition, in the order of ``bitmask``.
        bitmask: int32 [len(rows), ceil(vocab_size / 32)], on the CPU or the logits' device.
    """
    vocab_size = logits.shape[1]
    assert bitmask.shape == (len(rows), -(-vocab_size // 32))
    assert bitmask.dtype == torch.int32
    if not rows:
        return
    octets = bitmask.to(logits.device, non_blocking=True).view(torch.uint8)  # little-endian, as every torch machine
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=logits.device)
    refused = ((octets[:, :, None] & powers) == 0).flatten(1)[:, :vocab_size]  # [len(rows), vocab_size]
    if list(rows) == list(range(len(logits))):
        logits.masked_fill_(refused, -torch.inf)
    else:
        index = torch.tensor(rows, device=logits.device)
        logits.index_copy_(0, index, logits[index].masked_fill_(refused, -torch.inf))


class MaskBuilder:
    """Computes one step's bitmask in a thread of its own, while the step's forward pass runs."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-mask")

    def start(self, grammars: Sequence[Grammar]) -> Future[torch.Tensor]:
        """Begin ``fill_bitmask(grammars)``; the grammars are the thread's until the future's ``result()`` is there."""
        return self._thread.submit(fill_bitmask, tuple(grammars))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
