"""One stream: the time to first token for prompts of several lengths, and the time of each later token.

    python -m benchmarks.latency --model DIR --context 64 1024 8192 --tokens 64 --out result.json

The engine is stepped by hand and every step is timed, so there is neither a server nor a thread in between. GB/s is
what a token must read, active weights, states and what is cached of its context once, divided by the median time. Plain
reading is measured right after each stream, because memory bandwidth varies from minute to minute; *x limit* is the
time of a token over the time of plain reading.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from benchmarks.engine_options import add_engine_arguments, engine_options
from benchmarks.limits.linear_rates import measure_read_gb_s
from benchmarks.limits.token_reads import TokenReads
from benchmarks.machine import describe
from benchmarks.result_file import write_result
from deployments.cli.bench.prompts import VOCABULARY
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ModelLoadError
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

__all__ = ["Latency", "measure"]

WARM_UP_PROMPT, WARM_UP_TOKENS = [5, 6, 7], 8
READ_BYTES = 1 << 28  # more than any cache holds


@dataclass(frozen=True)
class Latency:
    """One stream after a prompt of ``context`` tokens."""

    context: int
    ttft_s: float
    tpot_median_ms: float
    tpot_p99_ms: float
    read_gb_s: float  # at the median
    plain_read_gb_s: float  # of summing a large buffer, right afterwards
    over_limit: float  # the median over the time of plain reading


def measure(
    engine: Engine, context: int, num_tokens: int, reads: TokenReads, weight_bytes: int, element_bytes: int
) -> Latency:
    """Run a single request; its prompt is random, so that nothing of it is cached.

    Args:
        num_tokens: tokens of the answer; the first one gives TTFT.
        reads: what a token reads.
        weight_bytes: bytes of one weight.
        element_bytes: bytes of one element of the keys and values.
    """
    rng = random.Random(context)
    seconds = _step_seconds(engine, [rng.randrange(*VOCABULARY) for _ in range(context)], num_tokens)
    decodes = 1e3 * np.array(seconds[1:])
    median = float(np.median(decodes))
    read = reads.bytes_at(context + num_tokens // 2, weight_bytes, element_bytes)
    gb_s, plain_gb_s = read / median / 1e6, measure_read_gb_s(READ_BYTES)
    return Latency(
        context,
        round(seconds[0], 4),
        round(median, 3),
        round(float(np.percentile(decodes, 99)), 3),
        round(gb_s, 2),
        round(plain_gb_s, 2),
        round(plain_gb_s / gb_s, 3),
    )


def _step_seconds(engine: Engine, prompt: list[int], num_tokens: int) -> list[float]:
    """Return the seconds until the first token and between each and the next."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    seconds, started = [], perf_counter()
    engine.add_request(EngineRequest("stream", prompt, params))
    while engine.has_unfinished:
        if engine.step():  # steps of an incomplete prefill return no token
            now = perf_counter()
            seconds.append(now - started)
            started = now
    return seconds


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description="Latency of one stream.")
    add_engine_arguments(parser)
    parser.add_argument("--context", type=int, nargs="+", default=[64, 1024, 8192], help="tokens of the prompts")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to answer with, at least 3")
    parser.add_argument("--out", type=Path)
    parser.set_defaults(max_model_len=0)
    options = parser.parse_args(arguments)
    options.max_model_len = options.max_model_len or max(options.context) + options.tokens
    try:
        chosen = engine_options(options)
    except ValueError as error:
        parser.error(str(error))
    try:
        reads = TokenReads.of(options.model)
    except ModelLoadError as error:
        parser.error(str(error))
    engine = Engine.from_config(EngineConfig.from_options(options.model, chosen))
    _step_seconds(engine, WARM_UP_PROMPT, WARM_UP_TOKENS)
    element_bytes = getattr(torch, engine.info.dtype).itemsize
    weight_bytes = 1 if options.quantization == "int8" else element_bytes
    results = []
    print(f"{'context':>8} {'TTFT s':>8} {'TPOT ms, median':>16} {'p99':>8} {'GB/s':>7} {'plain':>7} {'x limit':>8}")
    for context in options.context:
        run = measure(engine, context, options.tokens, reads, weight_bytes, element_bytes)
        results.append(asdict(run))
        print(
            f"{context:8} {run.ttft_s:8.3f} {run.tpot_median_ms:16.2f} {run.tpot_p99_ms:8.2f} {run.read_gb_s:7.2f} "
            f"{run.plain_read_gb_s:7.2f} {run.over_limit:8.2f}",
            flush=True,
        )
    engine.close()
    if options.out:
        document = {
            "machine": describe(torch.device("cpu")),
            "model": Path(options.model).name,
            "options": chosen,
            "tokens": options.tokens,
            "results": results,
        }
        write_result(options.out, document)


if __name__ == "__main__":
    main()
