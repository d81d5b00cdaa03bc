"""The accuracy that int8 and int4 weights cost: the demo model's perplexity on questions outside its training set.

usage: python -m benchmarks.perplexity [--out FILE]

The text is every held-out phrasing followed by its answer. The model has memorised the answers, so they hardly change;
the questions are new to it and most sensitive to quantization. A model of four million parameters says
little about large ones.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.result_file import write_result
from demo.demo_model import MODEL_DIR, held_out_questions
from engine.llm import LLM
from engine.sampling_params import SamplingParams

VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


def logprobs_of_text(options: dict[str, Any]) -> dict[str, list[float]]:
    """Return the log-probability of each token of the questions and of the answers, with these engine options."""
    llm = LLM(str(MODEL_DIR), device="cpu", enable_prefix_caching=False, **options)
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    by_kind: dict[str, list[float]] = {"questions": [], "answers": []}
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for far in (False, True):
        for text, question in held_out_questions(far=far):
            asked = tokenizer.chat_template.encode([{"role": "user", "content": text}])
            prompt = asked + tokenizer.encode(question.answer)
            scored = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].prompt_logprobs
            assert scored is not None
            logprobs = [
                choices[token].logprob for token, choices in zip(prompt, scored, strict=True) if choices is not None
            ]
            by_kind["questions"] += logprobs[: len(asked) - 1]
            by_kind["answers"] += logprobs[len(asked) - 1 :]
    return by_kind


def perplexity(logprobs: list[float]) -> float:
    """Return e to the mean loss."""
    return math.exp(-sum(logprobs) / len(logprobs))


def main() -> None:
    """Print a line for each kind of weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    out: Path | None = parser.parse_args().out
    result: dict[str, Any] = {"machine": describe(torch.device("cpu"))}
    for name, options in VARIANTS.items():
        by_kind = logprobs_of_text(options)
        result[name] = {
            kind: {"tokens": len(logprobs), "perplexity": perplexity(logprobs)} for kind, logprobs in by_kind.items()
        }
        for kind, figures in result[name].items():
            ratio = figures["perplexity"] / result["float32"][kind]["perplexity"]
            print(f"{name:10s} {kind:10s} perplexity {figures['perplexity']:8.4f}, {ratio:.4f} x float32")
    if out is not None:
        write_result(out, result)


if __name__ == "__main__":
    main()
