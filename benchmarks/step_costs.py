"""How well an engine predicts its steps: ``python -m benchmarks.step_costs MODEL``.

Streams decode while prompts arrive. Before each step its time is predicted from the costs that the engine has fitted
so far, which is what routers know. Prints the fitted costs and the errors of the second half of the steps, and writes
JSON.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.result_file import write_result
from engine.config import EngineConfig
from engine.engine import Engine
from engine.observability.step_costs import StepCosts, StepSpeeds
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

__all__ = ["main", "measure"]

_VOCABULARY = 1_000  # token ids of the prompts are below this


class _Recorder(StepSpeeds):
    """Keeps what each step computed, its predicted and its measured seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, int, int, float, float]] = []

    def record(self, num_prefill_tokens: int, num_sequences: int, num_kv_tokens: int, seconds: float) -> None:
        step = num_prefill_tokens, num_sequences, num_kv_tokens
        if seconds > 0 and num_prefill_tokens + num_sequences:
            self.steps.append((*step, self.costs.seconds(*step), seconds))
        super().record(*step, seconds)


def measure(engine: Engine, *, num_streams: int, num_prompts: int, seed: int = 0) -> dict[str, Any]:
    """Run requests whose prompts arrive while others decode; return the costs and the errors of their predictions.

    Args:
        engine: an idle engine.
        num_streams: answers that decode at a time, at most.
        num_prompts: requests in all, with prompts of 50 to 1,000 tokens.
        seed: of the prompts.
    """
    recorder = engine.meter.speeds = _Recorder()
    rng, waiting, number = random.Random(seed), num_prompts, 0
    while waiting or engine.has_unfinished:
        if (
            waiting
            and len(engine.scheduler.running) + len(engine.scheduler.waiting) < num_streams
            and rng.random() < 0.2
        ):
            prompt = [rng.randrange(_VOCABULARY) for _ in range(round(50 * 20 ** rng.random()))]
            params = SamplingParams(max_tokens=rng.randrange(20, 120), ignore_eos=True)
            engine.add_request(EngineRequest(str(number), prompt, params))
            waiting, number = waiting - 1, number + 1
        engine.step()
    half = recorder.steps[len(recorder.steps) // 2 :]
    return {
        "costs": {name: getattr(recorder.costs, name) for name in StepCosts.__struct_fields__},
        "prefill_tokens_per_s": recorder.prefill_tokens_per_s,
        "decodes": _errors(half, lambda step: not step[0]),
        "with prompts": _errors(half, lambda step: step[0] > 0),
    }


def _errors(
    steps: list[tuple[int, int, int, float, float]], counts: Callable[[tuple[int, int, int, float, float]], bool]
) -> dict[str, float]:
    """Return the number of steps that count, the relative error of their total, and the percentiles of each one's."""
    chosen = [step for step in steps if counts(step)]
    predicted, measured = (np.array([step[index] for step in chosen]) for index in (3, 4))
    errors = np.abs(predicted / measured - 1)
    return {
        "steps": len(chosen),
        "total": float(predicted.sum() / measured.sum() - 1),
        "p50": float(np.percentile(errors, 50)),
        "p90": float(np.percentile(errors, 90)),
    }


def main() -> None:
    """Measure the engine with one model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step_costs.json"))
    args = parser.parse_args()
    engine = Engine.from_config(EngineConfig.from_options(args.model, {"skip_tokenizer_init": True}))
    result = measure(engine, num_streams=args.streams, num_prompts=args.prompts)
    for name, value in result["costs"].items():
        print(f"{name:<18} {value * 1e6:12.2f} us")
    for kind in ("decodes", "with prompts"):
        figures = result[kind]
        print(
            f"{kind:<14} {figures['steps']:5} steps, total {figures['total']:+.1%}, error p50 {figures['p50']:.1%}, "
            f"p90 {figures['p90']:.1%}"
        )
    write_result(args.out, {Path(args.model).name: result})


if __name__ == "__main__":
    main()
