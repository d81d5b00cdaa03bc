"""The process that `python -m benchmarks.startup` starts: loads the engine, generates one token, reports the times.

It prints one JSON line with the seconds of each part. Nothing heavy may be imported before the clock of ``imports``
starts.
"""

from __future__ import annotations

import argparse
import json
import logging
import time

__all__: list[str] = []

PROMPT = [5, 6, 7]
WEIGHTS_LOADED, CACHE_MADE = "Model loading took", "KV cache size"  # parts of the engine's log messages


class _Marks(logging.Handler):
    """Records when the engine logs the end of each part of its start."""

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        for words in (WEIGHTS_LOADED, CACHE_MADE):
            if words in record.getMessage():
                self.at[words] = record.created


def main() -> None:
    """Print the line."""
    began = time.time()
    parser = argparse.ArgumentParser()
    parser.add_argument("--started", type=float, required=True, help="when the process was started, by the clock")
    parser.add_argument("--model", required=True)
    parser.add_argument("--options", type=json.loads, default={})
    options = parser.parse_args()
    from engine.llm import LLM
    from engine.sampling_params import SamplingParams
    from engine.worker import model_runner  # what Engine.from_config imports later

    imported = time.time()
    marks = _Marks()
    model_runner.logger.addHandler(marks)
    model_runner.logger.setLevel(logging.INFO)
    llm = LLM(options.model, **options.options)
    loaded = time.time()
    llm.generate(
        {"prompt_token_ids": PROMPT},
        SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
        use_tqdm=False,
    )
    done = time.time()
    weights, cache = (marks.at.get(words, loaded) for words in (WEIGHTS_LOADED, CACHE_MADE))
    parts = {
        "interpreter": began - options.started,
        "imports": imported - began,
        "tokenizer and weights": weights - imported,
        "KV cache": cache - weights,
        "other": loaded - cache,
        "first step": done - loaded,
    }
    print(json.dumps({name: round(seconds, 3) for name, seconds in parts.items()}), flush=True)


if __name__ == "__main__":
    main()
