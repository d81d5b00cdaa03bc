"""Drafts by suffix lookup: the demo model's corpus questions with and without ``speculative_config``.

    python -m benchmarks.earlier_answers --model demo/model --out result.json

The demo model recites the answers that it was trained on, so what repeats is not planted. Workloads, each at several
numbers of streams; a stream asks its next question when its answer has ended:

- ``questions``: 20 questions, each in five phrasings, in random order. Before each repetition with drafts, the engine
  forgets all earlier answers.
- ``quotes``: 100 questions once, after a system prompt of three passages, of which one is the answer.
- ``random``: prompts of random tokens at temperature 1: hardly a token is right, so that lookups cost and gain nothing.
- ``drawn``: as ``questions``, at temperature 1.

Each repetition answers the same requests without drafts and with them, in alternating order. The ratios are medians of
the repetitions'; that of CPU time says what the gain is on a machine that other work shares. The answers must be the
same.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterable
from collections.abc import Sequence as GenericSequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.engine_options import add_engine_arguments, engine_options
from benchmarks.machine import describe
from benchmarks.result_file import write_result
from demo.corpus import Question, load_corpus
from deployments.cli.bench.prompts import VOCABULARY
from engine.config import EngineConfig
from engine.engine import Engine
from engine.observability.observer import EngineObserver
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.drafting.configured import new_drafter
from engine.scheduling.drafting.drafter import Drafter
from engine.scheduling.scheduler_output import SchedulerOutput, StepTimes
from engine.sequence import Sequence

__all__ = ["WORKLOADS", "Gain", "measure"]

WORKLOADS = ("questions", "quotes", "random", "drawn")
NUM_QUESTIONS, NUM_PHRASINGS, NUM_QUOTES, NUM_PASSAGES, MIN_RANDOM = 20, 5, 100, 3, 24


@dataclass(frozen=True)
class Gain:
    """One workload at one number of streams."""

    workload: str
    streams: int
    requests: int
    tokens: int  # of all answers
    off_steps: int
    on_steps: int
    off_tokens_per_s: float
    on_tokens_per_s: float
    ratio: float
    cpu_ratio: float  # of tokens in a second of CPU time
    drafter_share: float  # of the step thread's CPU time with drafts: what it takes to find, check and keep drafts
    drafted: int
    accepted: int


@dataclass(frozen=True)
class _Run:
    answers: dict[str, list[int]]
    steps: int
    seconds: float
    cpu_seconds: float
    drafter_share: float
    drafted: int
    accepted: int


def requests_of(workload: str, model: str, streams: int, num_tokens: int) -> list[EngineRequest]:
    """Return the requests of a workload, in the order in which they are asked.

    Args:
        workload: one of ``WORKLOADS``.
        model: directory of the checkpoint, whose tokenizer and chat template make the prompts.
        streams: that ask them.
        num_tokens: of each answer, at most.
    """
    rng = random.Random(0)
    temperature = 1.0 if workload in ("drawn", "random") else 0.0
    if workload == "random":
        prompts = [[rng.randrange(*VOCABULARY) for _ in range(64)] for _ in range(max(MIN_RANDOM, 2 * streams))]
    else:
        prompts = _prompts(_chats(workload == "quotes", rng), model)
    return [
        EngineRequest(
            f"{workload}-{index}",
            prompt,
            SamplingParams(temperature=temperature, seed=index, max_tokens=num_tokens, ignore_eos=workload == "random"),
        )
        for index, prompt in enumerate(prompts)
    ]


def _chats(with_passages: bool, rng: random.Random) -> list[list[dict[str, str]]]:
    questions = load_corpus().questions
    if with_passages:
        chosen = rng.sample(questions, NUM_QUOTES)
        return [[_passages(one, questions, rng), {"role": "user", "content": one.ask[0]}] for one in chosen]
    asked = [
        phrasing
        for question in rng.sample(questions, NUM_QUESTIONS)
        for phrasing in rng.sample(question.ask, min(NUM_PHRASINGS, len(question.ask)))
    ]
    rng.shuffle(asked)
    return [[{"role": "user", "content": phrasing}] for phrasing in asked]


def _passages(question: Question, questions: tuple[Question, ...], rng: random.Random) -> dict[str, str]:
    """Return a system message of passages, of which one answers the question."""
    passages = [question.answer, *(other.answer for other in rng.sample(questions, NUM_PASSAGES - 1))]
    rng.shuffle(passages)
    return {"role": "system", "content": "\n\n".join(passages)}


def _prompts(chats: list[list[dict[str, str]]], model: str) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        for chat in chats
    ]


def measure(engine: Engine, workload: str, streams: int, num_tokens: int, repeats: int) -> Gain:
    """Answer the requests of a workload with and without drafts.

    Raises:
        RuntimeError: if an answer with drafts differs from the one without.
    """
    requests = requests_of(workload, engine.config.model, streams, num_tokens)
    drafter = engine.scheduler.drafter
    assert drafter is not None
    assert engine.config.speculation is not None
    _answer(engine, requests, streams, drafter)  # measures what steps cost, and warms the machine up
    pairs: list[tuple[_Run, _Run]] = []
    for repeat in range(repeats):
        fresh = new_drafter(engine.config, engine.config.speculation, engine.info, engine.block_manager)
        drafter.proposers = fresh.proposers
        order = (None, drafter) if repeat % 2 else (drafter, None)
        runs = {used: _answer(engine, requests, streams, used) for used in order}
        off, on = runs[None], runs[drafter]
        if off.answers != on.answers:
            raise RuntimeError(f"an answer of {workload!r} with drafts is another one than without")
        pairs.append((off, on))
    engine.scheduler.drafter = drafter
    num_generated = sum(map(len, pairs[0][0].answers.values()))
    return Gain(
        workload,
        streams,
        len(requests),
        num_generated,
        pairs[0][0].steps,
        round(statistics.median(on.steps for _, on in pairs)),
        round(statistics.median(num_generated / off.seconds for off, _ in pairs), 1),
        round(statistics.median(num_generated / on.seconds for _, on in pairs), 1),
        round(statistics.median(off.seconds / on.seconds for off, on in pairs), 3),
        round(statistics.median(off.cpu_seconds / on.cpu_seconds for off, on in pairs), 3),
        round(statistics.median(on.drafter_share for _, on in pairs), 4),
        round(statistics.median(on.drafted for _, on in pairs)),
        round(statistics.median(on.accepted for _, on in pairs)),
    )


def _answer(engine: Engine, requests: GenericSequence[EngineRequest], streams: int, drafter: Drafter | None) -> _Run:
    """Answer all requests, ``streams`` at a time."""
    counts = _Counting(engine)
    engine.scheduler.drafter = drafter
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    waiting, num_active = list(reversed(requests)), 0
    spent = _DrafterTime(drafter)
    started, cpu_started, thread_started = perf_counter(), process_time(), thread_time()
    while waiting or num_active:
        while waiting and num_active < streams:
            engine.add_request(waiting.pop())
            num_active += 1
        for output in engine.step():
            answers[output.request_id] += output.token_ids
            num_active -= output.is_last
    seconds, cpu_seconds = perf_counter() - started, process_time() - cpu_started
    engine.observers.members.remove(counts)
    share = spent.seconds / (thread_time() - thread_started)
    return _Run(answers, counts.steps, seconds, cpu_seconds, share, counts.drafted, counts.accepted)


class _Counting(EngineObserver):
    """Counts the steps of an engine and their draft tokens."""

    def __init__(self, engine: Engine) -> None:
        self.steps = self.drafted = self.accepted = 0
        engine.observers.members.append(self)

    def step_finished(self, output: SchedulerOutput, updated: Iterable[Sequence], times: StepTimes) -> None:
        self.steps += 1
        self.drafted += output.num_draft_tokens
        self.accepted += sum(output.num_accepted.values())


class _DrafterTime:
    """Adds up the CPU time of a drafter's methods, for the run that it is created for."""

    def __init__(self, drafter: Drafter | None) -> None:
        self.seconds = 0.0
        for name in ("add_drafts", "accept", "record_step", "learn") if drafter is not None else ():
            setattr(drafter, name, self._timed(getattr(type(drafter), name), drafter))

    def _timed(self, method: Callable[..., Any], drafter: Drafter | None) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = thread_time()
            result = method(drafter, *arguments)
            self.seconds += thread_time() - started
            return result

        return timed


def main(arguments: GenericSequence[str] | None = None) -> None:
    """Measure all workloads, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser)
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, choices=WORKLOADS)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer, at most")
    parser.add_argument("--method", default="suffix", choices=("suffix", "ngram"))
    parser.add_argument("--draft-tokens", type=int, default=24, help="num_speculative_tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    speculation = {"method": options.method, "num_speculative_tokens": options.draft_tokens}
    more = {"speculative_config": speculation, "enable_prefix_caching": False}
    engine = Engine.from_config(EngineConfig.from_options(options.model, engine_options(options) | more))
    gains = []
    for streams in options.streams:
        for workload in options.workloads:
            gain = measure(engine, workload, streams, options.tokens, options.repeats)
            print(gain, flush=True)
            gains.append(asdict(gain))
            document = {"machine": describe(torch.device(engine.info.device)), "model": Path(options.model).name}
            sizes = {"speculation": speculation, "tokens": options.tokens, "repeats": options.repeats}
            write_result(options.out, document | sizes | {"dtype": engine.info.dtype, "results": gains})
    engine.close()


if __name__ == "__main__":
    main()
