"""Sampling on the device: the reference's tokens and changed logits, and the time beside that of the memory they need.

Calls are replayed from a CUDA graph, so that the host's launches do not count. Logits of few sequences stay in a GPU's
second-level cache, and are read faster than the limit.
"""

from __future__ import annotations

import torch

from benchmarks.gpu.run.part_run import PartRun
from benchmarks.gpu.timing.floors import Work
from benchmarks.gpu.timing.graphs import captured
from benchmarks.machine import median_seconds
from kernels.sampling import reference
from kernels.sampling.base import Limits, SamplingOps
from kernels.sampling.select import select_sampling_ops

__all__ = ["run"]

OFF = float("inf")
TRUNCATIONS = {  # top_k (0: off), top_p, the floor of min_p
    "top-k 20, top-p 0.95": (20, 0.95, -OFF),
    "top-k 1000": (1000, OFF, -OFF),
    "top-p 0.9": (0, 0.9, -OFF),
    "top-p 0.999": (0, 0.999, -OFF),
    "min-p 0.05": (0, OFF, -3.0),
}
KINDS = ("argmax", "draw", *TRUNCATIONS)
CHECKED_ROWS = 16
BATCHES = (1, 64, 256)
SEEN = 0.01  # share of the vocabulary that a sequence has had


def run(part: PartRun) -> None:
    """Check each kind of choice on flat and on peaked logits, and record its time."""
    ops = select_sampling_ops(part.device.type)
    if ops is None:
        part.record("summary", ["no Triton kernels sample on this device"])
        return
    vocab_size = part.sizes.models["0.6b"].vocab_size
    lines: list[str] = []
    batches = {batch: _logits(part.device, batch, vocab_size, 1.5) for batch in BATCHES}
    _check_changes(part, ops, batches, lines)
    for kind in KINDS:
        for exponent in (0.1, 1.5):
            logits = _logits(part.device, CHECKED_ROWS, vocab_size, exponent)
            if not torch.equal(_choose(ops, kind, logits).cpu(), _expected(kind, logits.cpu())):
                part.fault(f"{kind}, exponent {exponent}: the tokens are not the reference's")
        for batch, logits in batches.items():
            _choose(ops, kind, logits)  # compiles
            seconds = median_seconds(captured(lambda: _choose(ops, kind, logits), part.device), part.device)  # noqa: B023
            figures = Work(num_bytes=logits.nbytes, flop=0).figures(seconds, part.limits)
            part.record(f"{kind}, batch {batch}", figures)
            lines.append(f"{kind:22} {batch:4} {1e3 * figures['milliseconds']:8.1f} us")
            part.record("summary", lines)


def _check_changes(part: PartRun, ops: SamplingOps, batches: dict[int, torch.Tensor], lines: list[str]) -> None:
    """Check what changes logits, and record its time."""
    for batch, of_batch in batches.items():
        changes = _changes(*of_batch.shape)
        for name, (arguments, num_bytes) in changes.items():
            there = [argument.to(part.device) for argument in arguments]
            ours, logits = of_batch.clone(), of_batch.to("cpu", copy=True)
            getattr(ops, name)(ours, *there)  # compiles
            getattr(reference, name)(logits, *arguments)
            if not torch.equal(ours.cpu(), logits):
                part.fault(f"{name}, batch {batch}: the logits are not the reference's")
            launch = captured(lambda: getattr(ops, name)(ours, *there), part.device)  # noqa: B023
            figures = Work(num_bytes=num_bytes, flop=0).figures(median_seconds(launch, part.device), part.limits)
            part.record(f"{name}, batch {batch}", figures)
            lines.append(f"{name:22} {batch:4} {1e3 * figures['milliseconds']:8.1f} us")
            part.record("summary", lines)


def _changes(num_rows: int, vocab_size: int) -> dict[str, tuple[list[torch.Tensor], int]]:
    """Return the arguments of each change after the logits, and the bytes that it must move."""
    random = torch.Generator().manual_seed(num_rows)
    rows, factors = torch.arange(num_rows), torch.full((num_rows, 1), 1.3)
    counts = (torch.rand(num_rows, vocab_size, generator=random) < SEEN).int()
    num_seen = int(counts.sum())
    bitmask = torch.randint(-(2**31), 2**31, (num_rows, -(-vocab_size // 32)), generator=random).int()
    token_ids = torch.randint(vocab_size, (num_rows,), generator=random)
    return {
        "add_biases": ([rows, token_ids, factors.view(-1)], 28 * num_rows),
        "forbid_tokens": ([rows, token_ids, rows], 32 * num_rows),
        "penalise_repetition": ([rows, counts.bool(), factors], counts.numel() + 8 * num_seen),
        "penalise_counts": ([rows, counts, factors, factors], counts.nbytes + 8 * num_seen),
        "apply_bitmask": ([rows, bitmask], bitmask.nbytes + 2 * counts.numel()),  # half of the logits are forbidden
    }


def _logits(device: torch.device, num_rows: int, vocab_size: int, exponent: float) -> torch.Tensor:
    """Return rows whose probabilities fall with the rank to the power of ``exponent``, each in an order of its own.

    They are made on the device: a CPU takes seconds for as many orders.
    """
    random = torch.Generator(device).manual_seed(num_rows)
    orders = torch.rand(num_rows, vocab_size, generator=random, device=device).argsort(dim=1)
    return (-exponent * torch.arange(1, vocab_size + 1, device=device).log())[orders]


def _parameters(kind: str, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Limits]:
    """Return temperatures, keys of noise and limits."""
    top_k, top_p, floor = TRUNCATIONS.get(kind, (0, OFF, -OFF))
    temperatures = torch.ones(len(logits), 1, device=logits.device)
    keys = torch.arange(2 * len(logits), dtype=torch.int32, device=logits.device).view(-1, 2)
    counts = torch.full_like(temperatures, top_k or logits.shape[1], dtype=torch.int64)
    return temperatures, keys, Limits(counts, top_p * temperatures, floor * temperatures)


def _choose(ops: SamplingOps, kind: str, logits: torch.Tensor) -> torch.Tensor:
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    temperatures, keys, limits = _parameters(kind, logits)
    if kind == "argmax":
        ops.argmax(tokens, logits, None)
    elif kind == "draw":
        ops.draw(tokens, logits, None, temperatures, keys)
    else:
        ops.truncated_draw(tokens, logits, None, temperatures, keys, limits)
    return tokens


def _expected(kind: str, logits: torch.Tensor) -> torch.Tensor:
    temperatures, keys, limits = _parameters(kind, logits)
    if kind == "argmax":
        return reference.argmax(logits)
    if kind == "draw":
        return reference.draw(logits, temperatures, keys)
    return reference.truncated_draw(logits, temperatures, keys, limits)
