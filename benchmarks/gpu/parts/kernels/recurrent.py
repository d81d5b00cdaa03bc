"""The operations of recurrent layers: against the reference in float64, the same bits in other steps, and their times.

Prompts are computed in both forms: in chunks, and token by token as ``batch_invariant`` asks for. A decode is also
captured in a CUDA graph and replayed for other slots, with padding, as the engine's decodes are. The times stand beside
what reading and writing the states and the tokens takes; at last the kernels of prompts are timed with other sizes.
"""

from __future__ import annotations

from itertools import zip_longest
from time import perf_counter, time_ns

import torch

from benchmarks.gpu.inputs.recurrent_operations import Chunk, Operation, batch_of, operations, random_states
from benchmarks.gpu.run.part_run import PartRun
from benchmarks.gpu.timing.floors import Work
from benchmarks.gpu.timing.graphs import captured
from benchmarks.machine import median_seconds
from kernels.recurrent.base import RecurrentOps
from kernels.recurrent.reference import ReferenceOps
from kernels.recurrent.select import select_recurrent_ops

__all__ = ["run"]

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest output
STATE_TOLERANCES = {  # of the largest element: states are float32, but chunks of prompts multiply them in the dtype
    torch.float32: 1e-4,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
}
WORST = 1e9
TUNING_SECONDS = 20.0  # for the times with other sizes, compilation included
NUM_SLOTS = 9
MIXED = [  # slots 1 and 2 belong to no sequence, 7 and 8 get snapshots
    Chunk(1, slot=0),
    Chunk(1, slot=5),
    Chunk(170, slot=3, save=(15, 7)),
    Chunk(2, slot=6),
    Chunk(73, slot=4, starts=True, save=(63, 8)),
]
PROMPTS = [chunk for chunk in MIXED if chunk.length > 2]
DECODES = [Chunk(1, slot) for slot in (0, 1, 2, 3)]
OTHER_DECODES = [Chunk(1, 6), Chunk(1, -1), Chunk(1, 1), Chunk(1, 8)]


def run(part: PartRun) -> None:
    """Check every dtype, then record the times in bfloat16."""
    ops, by_token = select_recurrent_ops(part.device), select_recurrent_ops(part.device, batch_invariant=True)
    part.record("implementation", type(ops).__name__)
    for operation in operations(part.sizes.recurrent, part.device):
        for dtype in TOLERANCES:
            _check_step(part, ops, operation, dtype, MIXED)
            _check_step(part, by_token, operation, dtype, MIXED, ", token by token")
            _check_replay(part, ops, operation, dtype)
            _check_neighbours(part, ops, operation, dtype)
            _check_bits(part, by_token, operation, dtype)
    lines: list[str] = []
    for operation in operations(part.sizes.recurrent, part.device):
        for batch in part.sizes.decode_batches:
            lines.append(_measure(part, ops, operation, [Chunk(1, slot) for slot in range(batch)]))
        for prompts, length in part.sizes.recurrent_prefills:
            chunks = [Chunk(length, slot, starts=True) for slot in range(prompts)]
            lines.append(_measure(part, ops, operation, chunks))
            if operation.name != "convolution":
                lines.append(_measure(part, by_token, operation, chunks, ", token by token"))
        part.record("summary", lines)
    if type(ops).__name__ == "TritonOps" and part.on_gpu:
        _tune(part, lines)


# --- right answers ---------------------------------------------------------------------------------------------------


def _check_step(
    part: PartRun, ops: RecurrentOps, operation: Operation, dtype: torch.dtype, chunks: list[Chunk], form: str = ""
) -> None:
    """Compare a step of decodes, chunks, a beginning and saves; the numbers are new in each run."""
    seed = time_ns() % 2**31
    part.record(f"seed, {operation.name}, {dtype}{form}", seed)
    tokens = operation.tokens(sum(chunk.length for chunk in chunks), dtype, seed)
    states, metadata = random_states(operation, NUM_SLOTS, part.device), batch_of(chunks, part.device)
    exact = states.double()
    output = operation(ops, tokens, states, metadata)
    expected = operation(ReferenceOps(), tuple(values.double() for values in tokens), exact, metadata)
    _judge(part, f"{operation.name}, {dtype}{form}", output, expected, states, exact, dtype)


def _check_replay(part: PartRun, ops: RecurrentOps, operation: Operation, dtype: torch.dtype) -> None:
    """Compare a replay for other tokens and slots, one of them padding, than those of the capture."""
    tokens, new_tokens = (operation.tokens(len(DECODES), dtype, seed) for seed in (0, 5))
    states, metadata = random_states(operation, NUM_SLOTS, part.device), batch_of(DECODES, part.device)
    outputs: list[torch.Tensor] = []
    replay = captured(lambda: outputs.append(operation(ops, tokens, states, metadata)), part.device)
    after = batch_of(OTHER_DECODES, part.device)
    metadata.slots.copy_(after.slots)
    for values, new in zip(tokens, new_tokens, strict=True):
        values.copy_(new)
    states.copy_(random_states(operation, NUM_SLOTS, part.device))
    exact = states.double()
    for output in outputs:
        output.fill_(torch.nan)
    replay()
    expected = operation(ReferenceOps(), tuple(values.double() for values in tokens), exact, after)
    computed = after.slots >= 0  # a padding sequence's output may be anything
    name = f"{operation.name}, {dtype}, replayed for other slots"
    _judge(part, name, outputs[-1][computed], expected[computed], states, exact, dtype)


def _check_neighbours(part: PartRun, ops: RecurrentOps, operation: Operation, dtype: torch.dtype) -> None:
    """Compare the bits of a sequence that is computed in one step, alone and with those among other sequences."""
    chunk = MIXED[-1]
    tokens = operation.tokens(sum(chunk.length for chunk in MIXED), dtype)
    states = random_states(operation, NUM_SLOTS, part.device)
    together = operation(ops, tokens, states, batch_of(MIXED, part.device))
    own = tuple(values[-chunk.length :] for values in tokens)
    alone = operation(ops, own, random_states(operation, NUM_SLOTS, part.device), batch_of([chunk], part.device))
    if not torch.equal(alone, together[-chunk.length :]):
        part.fault(f"{operation.name}, {dtype}: tokens have other bits alone than among others")


def _check_bits(part: PartRun, ops: RecurrentOps, operation: Operation, dtype: torch.dtype) -> None:
    """Compare the bits of a sequence's tokens one by one and in a chunk, with those among other sequences."""
    length = MIXED[-1].length
    tokens = operation.tokens(sum(chunk.length for chunk in MIXED), dtype)
    together = operation(ops, tokens, random_states(operation, NUM_SLOTS, part.device), batch_of(MIXED, part.device))
    own = tuple(values[-length:] for values in tokens)
    for sizes in ([1] * length, [5, length - 5]):
        states, first = random_states(operation, 1, part.device), 0
        outputs = []
        for size in sizes:
            step = tuple(values[first : first + size] for values in own)
            batch = batch_of([Chunk(size, 0, starts=first == 0)], part.device)
            outputs.append(operation(ops, step, states, batch))
            first += size
        if not torch.equal(torch.cat(outputs), together[-length:]):
            part.fault(f"{operation.name}, {dtype}: tokens have other bits in chunks of {sizes[:2]} than among others")


def _judge(
    part: PartRun,
    name: str,
    output: torch.Tensor,
    expected: torch.Tensor,
    states: torch.Tensor,
    exact: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Compare outputs and all slots: also those that the step must leave alone."""
    for what, error, tolerance in (
        (name, _error(output, expected), TOLERANCES[dtype]),
        (f"{name}, states", _error(states, exact), STATE_TOLERANCES[dtype]),
    ):
        part.record(f"error, {what}", error)
        if error > tolerance:
            part.fault(f"{what}: the largest error is {error:.3g} of the largest element, tolerance {tolerance:.3g}")


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest element; 1e9 at most, and if an element is NaN."""
    error = float((actual.double() - expected.double()).abs().max() / expected.abs().max())
    return error if error < WORST else WORST


# --- times -----------------------------------------------------------------------------------------------------------


def _measure(part: PartRun, ops: RecurrentOps, operation: Operation, chunks: list[Chunk], form: str = "") -> str:
    """Record the time of a step in a graph, beside the time of moving its bytes; return a line for the summary."""
    num_tokens = sum(chunk.length for chunk in chunks)
    tokens = operation.tokens(num_tokens, torch.bfloat16)
    states, metadata = random_states(operation, len(chunks), part.device), batch_of(chunks, part.device)
    output = operation(ops, tokens, states, metadata)  # compiles
    run = captured(lambda: operation(ops, tokens, states, metadata), part.device)
    seconds = median_seconds(run, part.device)
    reads = 0 if chunks[0].starts else states.nbytes
    num_bytes = reads + states.nbytes + sum(values.numel() * values.element_size() for values in (*tokens, output))
    figures = Work(num_bytes=num_bytes, flop=0).figures(seconds, part.limits)
    name = f"{operation.name}, {len(chunks)} x {chunks[0].length} tokens{form}"
    part.record(name, figures)
    return f"{name:56} {figures['milliseconds']:8.3f} ms, floor {figures['floor_milliseconds']:7.3f}"


def _tune(part: PartRun, lines: list[str]) -> None:
    """Check chunks in float32, and record the times of prompts with other sizes, as far as TUNING_SECONDS reach."""
    from benchmarks.gpu.inputs.recurrent_tunings import EXACT, TUNINGS, TunedOps

    started = perf_counter()
    timed = [operation for operation in operations(part.sizes.recurrent, part.device) if operation.name in TUNINGS]
    _check_step(part, TunedOps(EXACT), timed[0], torch.float32, PROMPTS, ", in chunks")
    for tunings in zip_longest(*(TUNINGS[operation.name] for operation in timed)):
        for operation, tuning in zip(timed, tunings, strict=True):
            for prompts, length in part.sizes.recurrent_prefills if tuning is not None else ():
                if perf_counter() - started < TUNING_SECONDS:
                    chunks = [Chunk(length, slot, starts=True) for slot in range(prompts)]
                    lines.append(_measure(part, TunedOps(tuning), operation, chunks, f", {tuning}"))
    part.record("summary", lines)
