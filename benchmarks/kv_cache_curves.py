"""The benefit of the KV cache: the time of a long answer with it, and with everything recomputed for each token.

    python -m benchmarks.kv_cache_curves --model DIR --tokens 512 --out curves.json --plot curves.png

Without a cache, each token is a request of its own: the prompt and all tokens so far go in, one token comes out, and
prefix caching is off. Both ways continue the same tokens. Without the cache only every ``--stride``-th token is timed;
between two of them its time is taken to be linear. The plot needs the extra ``bench``.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.engine_options import add_engine_arguments, engine_options
from benchmarks.machine import describe
from deployments.cli.bench.prompts import VOCABULARY
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

__all__ = ["main", "with_cache", "without_cache"]

Seconds = NDArray[np.float64]  # [tokens of the answer]


def with_cache(engine: Engine, prompt: list[int], num_tokens: int) -> tuple[list[int], Seconds]:
    """Answer a prompt with the KV cache; return the tokens and the seconds of each."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    tokens: list[int] = []
    seconds, started = [], perf_counter()
    engine.add_request(EngineRequest("with", prompt, params))
    while engine.has_unfinished:
        for output in engine.step():
            now = perf_counter()
            tokens += output.token_ids
            seconds.append(now - started)
            started = now
    return tokens, np.array(seconds)


def without_cache(engine: Engine, prompt: list[int], tokens: list[int], stride: int) -> Seconds:
    """Return the seconds of each token if all tokens before it are recomputed."""
    measured = sorted({*range(0, len(tokens), stride), len(tokens) - 1})
    seconds = [with_cache(engine, prompt + tokens[:position], 1)[1][0] for position in measured]
    timed: Seconds = np.interp(np.arange(len(tokens)), measured, seconds)
    return timed


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write JSON to ``--out`` and the plot to ``--plot``."""
    parser = argparse.ArgumentParser(description="Time of a long answer with and without a KV cache.")
    add_engine_arguments(parser)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="of the answer")
    parser.add_argument("--stride", type=int, default=8, help="of the tokens that are timed without the cache")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, help="PNG")
    parsed = parser.parse_args(arguments)
    options = engine_options(parsed) | {"enable_prefix_caching": False}
    engine = Engine.from_config(EngineConfig.from_options(parsed.model, options))
    rng = random.Random(0)
    prompt = [rng.randrange(*VOCABULARY) for _ in range(parsed.prompt_tokens)]
    with_cache(engine, prompt, 4)  # warm
    tokens, cached = with_cache(engine, prompt, parsed.tokens)
    recomputed = without_cache(engine, prompt, tokens, parsed.stride)
    engine.close()
    ratios = {str(count): round(float(recomputed[:count].sum() / cached[:count].sum()), 2) for count in _marks(cached)}
    print(f"{'tokens':>8} {'with s':>9} {'without s':>10} {'ratio':>7}")
    for count in _marks(cached):
        print(f"{count:8} {cached[:count].sum():9.3f} {recomputed[:count].sum():10.3f} {ratios[str(count)]:7.1f}")
    if parsed.out:
        _write(parsed, options, cached, recomputed, ratios)
    if parsed.plot:
        _plot(parsed.plot, cached, recomputed)


def _marks(seconds: Seconds) -> list[int]:
    """Return the token counts of the table: powers of two, and the total."""
    return [1 << power for power in range(4, len(seconds).bit_length()) if 1 << power < len(seconds)] + [len(seconds)]


def _write(
    parsed: argparse.Namespace, options: dict[str, Any], cached: Seconds, recomputed: Seconds, ratios: dict[str, float]
) -> None:
    document = {
        "machine": describe(torch.device("cpu")),
        "model": Path(parsed.model).name,
        "options": options,
        "prompt_tokens": parsed.prompt_tokens,
        "stride": parsed.stride,
        "ratio_by_tokens": ratios,
        "with_cache_s": cached.round(5).tolist(),
        "without_cache_s": recomputed.round(5).tolist(),
    }
    parsed.out.write_text(json.dumps(document) + "\n")


def _plot(path: Path, cached: Seconds, recomputed: Seconds) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for seconds, label in ((cached, "KV cache"), (recomputed, "recomputed")):
        positions = np.arange(1, len(seconds) + 1)
        left.plot(positions, seconds.cumsum(), label=label)
        right.plot(positions, 1e3 * seconds, label=label)
    left.set(xlabel="tokens of the answer", ylabel="seconds so far")
    right.set(xlabel="tokens of the answer", ylabel="ms for this token", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
