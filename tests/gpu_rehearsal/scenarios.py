"""Requests that together make steps of every kind, and what an engine answers to them."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from engine.engine import Engine
from engine.llm import LLM, RequestOutput
from engine.options.structured_outputs import StructuredOutputsParams
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SchedulerOutput
from tests.gpu_rehearsal.code_lines import ROOT
from tests.gpu_rehearsal.machine import Machine

__all__ = ["DEMO_MODEL", "OPTIONS", "PARAMS", "SCENARIOS", "Scenario", "Seen", "answers", "watch"]

DEMO_MODEL = str(ROOT / "demo" / "model")
VOCAB_SIZE: int = json.loads((ROOT / "demo" / "model" / "config.json").read_text())["vocab_size"]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",  # on a GPU and on the CPU the same tokens
    "num_blocks": 256,
    "block_size": 16,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "use_tqdm_on_load": False,
}

# Every sampling parameter, each in a request of its own and several together.
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0, "seed": 1},
    "top_p": {"temperature": 1.0, "seed": 2, "top_p": 0.8},
    "top_k": {"temperature": 1.0, "seed": 3, "top_k": 20},
    "min_p": {"temperature": 1.0, "seed": 4, "min_p": 0.05},
    "all truncations": {"temperature": 0.9, "seed": 5, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "repetition_penalty": {"temperature": 0.0, "repetition_penalty": 1.2},
    "output penalties": {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "logit_bias": {"temperature": 0.0, "logit_bias": {5: 3.0, 70: -2.0}},
    "allowed_token_ids": {"temperature": 1.0, "seed": 6, "allowed_token_ids": list(range(100, 160))},
    "bad_words": {"temperature": 0.0, "bad_words_token_ids": ((100,), (101, 102), (103, 104, 105))},
    "min_tokens": {"temperature": 0.0, "min_tokens": 6, "stop_token_ids": [7, 8]},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "prompt_logprobs": {"temperature": 0.0, "prompt_logprobs": 3, "logprobs": 0},
    "three answers": {"temperature": 1.0, "seed": 7, "n": 3, "logprobs": 2},
    "best_of": {"temperature": 1.0, "seed": 8, "n": 1, "best_of": 3},
    "beams": {"temperature": 0.0, "beam_width": 4, "n": 2},
    "regex": {"temperature": 1.0, "seed": 9, "structured_outputs": StructuredOutputsParams(regex="[a-f]{4,9}[.]")},
    "choice": {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(choice=["yes", "no"])},
    "everything": {
        "temperature": 1.2,
        "seed": 10,
        "top_p": 0.95,
        "top_k": 400,
        "min_p": 0.001,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logit_bias": {9: 1.0},
        "bad_words_token_ids": ((300, 301),),
        "min_tokens": 3,
        "logprobs": 20,
        "prompt_logprobs": 20,
    },
}
LOGPROB_TOLERANCE = 0.005
FLAT = {"temperature": 2.0, "seed": 12, "top_p": 0.999, "logit_bias": dict.fromkeys(range(900), -20.0)}


@dataclass(frozen=True)
class Scenario:
    """An engine's options, and the requests it gets at the same time."""

    params: list[dict[str, Any]]
    prompt_lengths: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    max_waits: int = 1  # of a step
    repeats: bool = False  # whether prompts repeat a short pattern, so that drafts are accepted

    def prompts(self) -> list[list[int]]:
        rng = random.Random(1)
        lengths = [self.prompt_lengths[i % len(self.prompt_lengths)] for i in range(len(self.params))]
        if self.repeats:
            return [([20 + i, 21, 22 + i, 23] * length)[:length] for i, length in enumerate(lengths)]
        return [[rng.randrange(10, VOCAB_SIZE) for _ in range(length)] for length in lengths]


SCENARIOS: dict[str, Scenario] = {
    "every parameter": Scenario(list(PARAMS.values()), [30, 5, 150, 17, 1]),
    "one at a time": Scenario([PARAMS["greedy"], PARAMS["top_p"]], [3, 40], {"max_num_seqs": 1}),
    # Top-p keeps more tokens than the CPU's candidates, which then sorts the vocabulary.
    "flat": Scenario([FLAT, PARAMS["greedy"], FLAT | {"logprobs": 2}], [9, 20]),
    "drafts": Scenario(
        [PARAMS[name] for name in ("greedy", "logprobs", "drawn", "greedy", "prompt_logprobs")],
        [64, 40],
        {
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
            "max_decode_slowdown": None,  # however long the steps take
        },
        repeats=True,
    ),
    "swapped": Scenario(
        [PARAMS[name] for name in ("greedy", "three answers", "beams", "drawn", "output penalties")],
        [30, 20],
        {"num_blocks": 18, "block_size": 4, "swap_space_gib": 0.01, "max_num_seqs": 8},
    ),
    "flash_attn": Scenario(
        [PARAMS[name] for name in ("greedy", "top_p", "three answers", "prompt_logprobs", "drawn")],
        [30, 5, 150, 1],
        {"dtype": "bfloat16", "block_size": 256, "num_blocks": 32},
    ),
    "two ranks": Scenario(
        [PARAMS[name] for name in ("greedy", "three answers", "beams", "everything", "regex")],
        [30, 20],
        {"num_blocks": 18, "block_size": 4, "swap_space_gib": 0.01, "max_num_seqs": 8, "tensor_parallel_size": 2},
    ),
}


@dataclass
class Seen:
    """How many steps had what, to show that a scenario does what it is for."""

    steps: Counter[str] = field(default_factory=Counter)
    waits: Counter[int] = field(default_factory=Counter)  # steps by the number of their waits
    kinds_of_waits: set[str] = field(default_factory=set)

    def note(self, output: SchedulerOutput) -> None:
        counts = set(output.num_new_tokens)
        kinds = {
            "prefill": bool(counts) and min(counts) > 1,
            "mixed": 1 in counts and max(counts) > 1,
            "decode": counts == {1},
            "drafts": bool(output.drafts),
            "swap_out": bool(output.block_copies.swap_out),
            "swap_in": bool(output.block_copies.swap_in),
            "block_copies": bool(output.block_copies.on_device),
            "nothing sampled": bool(output.sequences) and not output.sampling,
            "a grammar": any(item.grammar is not None for item in output.sampling),
            "beams": any(item.params.uses_beam_search for item in output.sampling),
            "prompt log-probabilities": any(item.group.wants_prompt_logprobs for item in output.sequences),
        }
        self.steps.update(name for name, is_so in kinds.items() if is_so)


def watch(engine: Engine, machine: Machine) -> Seen:
    """Note the kinds of the engine's steps from now on."""
    seen, run = Seen(), engine.runner.run

    def watched(output: SchedulerOutput, *args: Any) -> Any:
        seen.note(output)
        sampled = run(output, *args)
        seen.waits[len(machine.waits)] += 1
        seen.kinds_of_waits |= {wait.kind for wait in machine.waits}
        return sampled

    engine.runner.run = watched  # type: ignore[method-assign]
    return seen


def generate(llm: LLM, scenario: Scenario, max_tokens: int = 9) -> list[RequestOutput]:
    """Run a scenario's requests."""
    prompts: Any = [{"prompt_token_ids": ids} for ids in scenario.prompts()]
    params = [SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **item}) for item in scenario.params]
    return llm.generate(prompts, params, use_tqdm=False)


@dataclass(frozen=True, eq=False)
class Likelihood:
    """A token's log-probability and rank, equal to another if they differ by no more than devices may.

    They add in other orders, and so may one device in another process: rounded numbers would differ now and then.
    """

    logprob: float
    rank: int | None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Likelihood):
            return NotImplemented
        is_near = math.isclose(self.logprob, other.logprob, rel_tol=0, abs_tol=LOGPROB_TOLERANCE)
        if self.rank is None or other.rank is None:
            return is_near and self.rank is other.rank
        return is_near and abs(self.rank - other.rank) <= self.rank // 10  # less likely tokens are close together

    __hash__ = None  # type: ignore[assignment]


def answers(outputs: list[RequestOutput]) -> list[Any]:
    """Return the tokens of every answer, and their log-probabilities, to be compared with those of another device."""

    def likelihoods(logprobs: Any) -> Any:
        return [
            item and {token: Likelihood(logprob.logprob, logprob.rank) for token, logprob in item.items()}
            for item in logprobs or ()
        ]

    return [
        [(item.token_ids, item.finish_reason, likelihoods(item.logprobs)) for item in output.outputs]
        + [likelihoods(output.prompt_logprobs)]
        for output in outputs
    ]
