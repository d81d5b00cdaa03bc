"""What a change of the batch costs the sampler with penalties, which depend on the whole history of each sequence.

    python -m benchmarks.sampling [--running 256] [--context 2048] [--vocab-size 151936] [--out results.json]

One sequence of the batch is replaced before each step. The figures are those of ``Sampler.start`` before it touches the
logits: the columns of parameters and the tokens that each sequence has had, on one thread. On a CPU that includes the
memory of these tokens, a row of the vocabulary for each sequence.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.result_file import write_result
from engine.request import EngineRequest
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceGroup

CPU = torch.device("cpu")
KINDS: dict[str, SamplingParams] = {
    "no penalties": SamplingParams(),
    "repetition_penalty": SamplingParams(repetition_penalty=1.1),
    "frequency_penalty": SamplingParams(frequency_penalty=0.5),
}


def make_sequence(rng: random.Random, params: SamplingParams, context: int, vocab_size: int) -> Sequence:
    """Return a sequence whose tokens are half prompt, half output."""
    token_ids = [rng.randrange(vocab_size) for _ in range(context)]
    request = EngineRequest("request", token_ids[: context // 2], params)
    group = SequenceGroup(
        request, arrival=0, root=0, stop_token_ids=frozenset(), max_total_tokens=2 * context, seed=rng.getrandbits(30)
    )
    group.sequences[0].token_ids = token_ids
    return group.sequences[0]


def measure(
    params: SamplingParams, num_running: int, context: int, vocab_size: int, num_steps: int
) -> dict[str, float]:
    """Return medians in milliseconds: of steps with the same batch, and of those with a sequence replaced."""
    rng = random.Random(0)
    sampler = Sampler(vocab_size, CPU)
    sequences = [make_sequence(rng, params, context, vocab_size) for _ in range(num_running)]
    seconds: dict[str, list[float]] = {"same_batch_ms": [], "changed_batch_ms": []}
    for step in range(2 * num_steps + 2):
        if step % 2:
            sequences[rng.randrange(num_running)] = make_sequence(rng, params, context, vocab_size)
        for sequence in sequences:
            sequence.token_ids.append(rng.randrange(vocab_size))
        started = perf_counter()
        with torch.inference_mode():
            sampler._batch_of(sequences)
        if step >= 2:
            seconds["changed_batch_ms" if step % 2 else "same_batch_ms"].append(perf_counter() - started)
    return {name: round(1e3 * statistics.median(times), 2) for name, times in seconds.items()}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write JSON to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    print(f"{'parameters':20} {'same batch, ms':>16} {'changed batch, ms':>18}")
    for name, params in KINDS.items():
        results[name] = measure(params, args.running, args.context, args.vocab_size, args.steps)
        print(f"{name:20} {results[name]['same_batch_ms']:16} {results[name]['changed_batch_ms']:18}")
    if args.out:
        sizes = {"running": args.running, "context": args.context, "vocab_size": args.vocab_size}
        write_result(args.out, {"machine": describe(CPU)} | sizes | {"results": results})


if __name__ == "__main__":
    main()
