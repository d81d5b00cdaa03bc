"""The accuracy that quantised weights cost: the demo model's perplexity on questions outside its training set.

usage: python -m benchmarks.perplexity [--out FILE]

The text is every held-out phrasing followed by its answer. The model has memorised the answers, so they hardly change;
the questions are new to it and most sensitive to quantization. A model of four million parameters says
little about large ones.

Of the formats of quantised checkpoints, into which the weights are rounded, *codes* is computed from the codes, and
*dequantised* from the weights that they stand for, in bfloat16: what both differ by is the cost of the computation.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.quantised_formats import FORMATS, write_quantised
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


def logprobs_of_text(options: dict[str, Any], model: Path = MODEL_DIR) -> dict[str, list[float]]:
    """Return the log-probability of each token of the questions and of the answers, with these engine options."""
    llm = LLM(str(model), device="cpu", enable_prefix_caching=False, **options)
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
    llm.engine.close()
    return by_kind


def logprobs_of_variants() -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yield the name of each kind of weights, and its log-probabilities."""
    for name, options in VARIANTS.items():
        yield name, logprobs_of_text(options)
    for name, form in FORMATS.items():
        with tempfile.TemporaryDirectory(prefix="pg-perplexity-") as temporary:
            path = Path(temporary) / "model"
            write_quantised(MODEL_DIR, path, form)
            for computed, quantization in (("codes", None), ("dequantised", "dequantize")):
                options = {"dtype": "bfloat16", "quantization": quantization}
                yield f"{name}: {computed}", logprobs_of_text(options, path)


def perplexity(logprobs: list[float]) -> float:
    """Return e to the mean loss."""
    return math.exp(-sum(logprobs) / len(logprobs))


def main() -> None:
    """Print a line for each kind of weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    out: Path | None = parser.parse_args().out
    result: dict[str, Any] = {"machine": describe(torch.device("cpu"))}
    for name, by_kind in logprobs_of_variants():
        result[name] = {
            kind: {"tokens": len(logprobs), "perplexity": perplexity(logprobs)} for kind, logprobs in by_kind.items()
        }
        for kind, figures in result[name].items():
            ratio = figures["perplexity"] / result["float32"][kind]["perplexity"]
            print(f"{name:55s} {kind:10s} perplexity {figures['perplexity']:8.4f}, {ratio:.4f} x float32")
    if out is not None:
        write_result(out, result)


if __name__ == "__main__":
    main()
