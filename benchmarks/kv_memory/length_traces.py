"""Lengths of prompts and answers: read from a trace, or drawn to resemble a data set.

The synthetic lengths are synthetic: log-normal, with the mean lengths that Kwon et al. (2023, section 6.1) report for
ShareGPT and Alpaca. The spreads are not theirs. The answers' sigma of 0.76 is chosen so that reserving the maximum
wastes about as much as the paper's figure 2 says, which makes that line a calibration and only the others predictions;
the prompts' sigma of 1.2 is a guess at a heavy tail. Alpaca's spreads are taken to be ShareGPT's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["DATASETS", "Lengths", "read_trace", "synthetic_trace"]

DATASETS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}  # mean tokens of a prompt and of an answer
_PROMPT_SIGMA, _OUTPUT_SIGMA = 1.2, 0.76


@dataclass(frozen=True, slots=True)
class Lengths:
    """One request: tokens of its prompt and of its answer, both at least 1."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        """Tokens in the end."""
        return self.prompt + self.output


def synthetic_trace(dataset: str, count: int, *, max_length: int, seed: int) -> list[Lengths]:
    """Draw ``count`` requests that resemble ``dataset``, none longer than ``max_length`` in all; equal for equal seeds.

    Neither part is longer than half of ``max_length``; the means of DATASETS are met after that cut.
    """
    generator = np.random.default_rng(seed)
    prompt_mean, output_mean = DATASETS[dataset]
    prompts = _with_mean(generator.lognormal(0, _PROMPT_SIGMA, count), prompt_mean, max_length // 2)
    outputs = _with_mean(generator.lognormal(0, _OUTPUT_SIGMA, count), output_mean, max_length // 2)
    return [Lengths(int(prompt), int(output)) for prompt, output in zip(prompts, outputs, strict=True)]


def read_trace(path: Path, *, limit: int) -> list[Lengths]:
    """Read the first ``limit`` lines of a JSONL trace with ``input_length`` and ``output_length``.

    Raises:
        ValueError: if a line lacks a length, or has one below 1.
    """
    requests: list[Lengths] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if len(requests) == limit:
                break
            try:
                record = json.loads(line)
                lengths = Lengths(int(record["input_length"]), int(record["output_length"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}; give input_length and output_length") from error
            if min(lengths.prompt, lengths.output) < 1:
                raise ValueError(f"{path}, line {number}: {lengths} has a length below 1")
            requests.append(lengths)
    if not requests:
        raise ValueError(f"{path} holds no request")
    return requests


def _with_mean(draws: NDArray[np.float64], mean: float, longest: int) -> NDArray[np.int64]:
    """Scale positive draws, by bisection, so that their mean is ``mean`` after they are cut to [1, longest]."""
    low, high = 0.0, 1e6
    for _ in range(80):
        scale = (low + high) / 2
        lengths = np.clip(np.rint(draws * scale), 1, longest)
        low, high = (scale, high) if lengths.mean() < mean else (low, scale)
    return lengths.astype(np.int64)
