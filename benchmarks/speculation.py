"""Draft tokens: the speed of decoding with them as a ratio to that without, in the same run on the same engine.

    python -m benchmarks.speculation --model DIR --out result.json
    python -m benchmarks.speculation --model DIR --draft-model SMALLER --out result.json

Workloads, each at several numbers of streams:

- ``edit``: the request has a ``prediction``, which is its answer with one token in ten replaced.
- ``planted 90%``, ``70%`` and ``50%``: a proposer that knows the answer, and is wrong with the rest of probability.
- ``random``: prompts of random tokens at temperature 1, with prompt lookup: hardly a draft is right.
- with ``--draft-model`` instead ``draft model 90%``, ``80%``, ``70%`` and ``50%``: it computes the drafts, and each of
  their tokens is wrong with the rest of probability (planted_drafts.py).

A checkpoint with random weights repeats nothing on purpose, so that what the drafts are is planted, and what they gain
is measured. Each repetition decodes the same requests without drafts and with them; the ratio is the median of the
repetitions'. The same ratio of CPU time says what the gain is on a machine that other work shares. The answers must be
the same.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterable
from collections.abc import Sequence as GenericSequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch

from benchmarks.engine_options import add_engine_arguments, engine_options
from benchmarks.machine import describe
from benchmarks.planted_drafts import PlantedDraftModel, biased_requests
from benchmarks.result_file import write_result
from deployments.cli.bench.prompts import VOCABULARY
from engine.config import EngineConfig
from engine.engine import Engine
from engine.observability.observer import EngineObserver
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.drafting.drafter import Drafter
from engine.scheduling.drafting.proposer import Proposer
from engine.scheduling.scheduler_output import SchedulerOutput, StepTimes
from engine.sequence import Sequence

__all__ = ["DRAFT_MODEL", "WORKLOADS", "Gain", "measure"]

PROMPT_TOKENS, EDITED_EVERY = 64, 10
PLANTED = {"planted 90%": 0.9, "planted 70%": 0.7, "planted 50%": 0.5}
WORKLOADS = ("edit", *PLANTED, "random")
DRAFT_MODEL = {f"draft model {percent}%": percent / 100 for percent in (90, 80, 70, 50)}


@dataclass(frozen=True)
class Gain:
    """One workload at one number of streams."""

    workload: str
    streams: int
    off_tokens_per_s: float  # of all streams together, after their first tokens
    on_tokens_per_s: float
    ratio: float
    cpu_ratio: float  # of tokens in a second of CPU time
    drafted: int
    accepted: int
    off_cpu_ms: float  # of the process, for a token
    on_cpu_ms: float
    draft_ms: float  # that the draft model took of a step with drafts, its median; 0 without one


class _Speed(NamedTuple):
    """Tokens in a second of the clock, and of the processor."""

    per_s: float
    per_cpu_s: float


class PlantedProposer(Proposer):
    """Proposes the tokens of known answers; each is right with a given probability."""

    def __init__(self, answers: dict[str, list[int]], rate: float) -> None:
        self._answers, self._rate, self._rng = answers, rate, random.Random(0)

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """Return up to ``limit`` tokens."""
        right = self._answers[sequence.request_id][sequence.num_output_tokens :][:limit]
        return [token_id if self._rng.random() < self._rate else token_id ^ 1 for token_id in right]


class _Counting(EngineObserver):
    """Counts draft tokens, and the time that steps with drafts spent on a draft model."""

    def __init__(self) -> None:
        self.drafted = self.accepted = 0
        self.seconds: list[float] = []

    def step_finished(self, output: SchedulerOutput, updated: Iterable[Sequence], times: StepTimes) -> None:
        self.drafted += output.num_draft_tokens
        self.accepted += sum(output.num_accepted.values())
        if output.drafts:
            self.seconds.append(times.draft)


def measure(engine: Engine, workload: str, streams: int, num_tokens: int, repeats: int) -> Gain:
    """Decode the requests of a workload with and without drafts.

    Args:
        engine: has ``speculative_config``.
        workload: one of ``WORKLOADS``.
        streams: number of requests at a time.
        num_tokens: tokens of each answer.
        repeats: how often both are measured.

    Raises:
        RuntimeError: if an answer with drafts differs from the one without.
    """
    drafter = engine.scheduler.drafter
    assert drafter is not None
    requests = _requests(workload, streams, num_tokens, engine.info.vocab_size)
    answers, _ = _decode(engine, requests, None)
    if workload == "edit":
        requests = [_with_prediction(request, answers[request.request_id]) for request in requests]
    known: dict[str, Proposer] = drafter.proposers
    model = None if drafter.model is None else drafter.model.model
    if (rate := PLANTED.get(workload)) is not None:
        drafter.proposers = {"planted": PlantedProposer(answers, rate)}
    if (rate := DRAFT_MODEL.get(workload)) is not None:
        assert drafter.model is not None, "the engine has no draft model"
        drafter.model.model = PlantedDraftModel(drafter.model.model, rate)
    counts = _Counting()
    engine.observers.members.append(counts)
    speeds: list[tuple[_Speed, _Speed]] = []
    for _ in range(repeats):
        _, off = _decode(engine, requests, None)
        same, on = _decode(engine, requests, drafter, from_start=workload in DRAFT_MODEL)
        if same != answers:
            raise RuntimeError(f"an answer of {workload!r} with drafts is another one than without")
        speeds.append((off, on))
    engine.observers.members.remove(counts)
    engine.scheduler.drafter, drafter.proposers = drafter, known
    if drafter.model is not None and model is not None:
        drafter.model.model = model
    return _gain(workload, streams, speeds, counts)


def _gain(workload: str, streams: int, speeds: list[tuple[_Speed, _Speed]], counts: _Counting) -> Gain:
    return Gain(
        workload,
        streams,
        round(statistics.median(off.per_s for off, _ in speeds), 2),
        round(statistics.median(on.per_s for _, on in speeds), 2),
        round(statistics.median(on.per_s / off.per_s for off, on in speeds), 3),
        round(statistics.median(on.per_cpu_s / off.per_cpu_s for off, on in speeds), 3),
        counts.drafted // len(speeds),
        counts.accepted // len(speeds),
        round(statistics.median(1e3 / off.per_cpu_s for off, _ in speeds), 3),
        round(statistics.median(1e3 / on.per_cpu_s for _, on in speeds), 3),
        round(statistics.median([1e3 * seconds for seconds in counts.seconds] or [0.0]), 3),
    )


def _requests(workload: str, streams: int, num_tokens: int, vocab_size: int) -> list[EngineRequest]:
    """Return requests with prompts of random tokens."""
    if workload in DRAFT_MODEL:
        return biased_requests(streams, PROMPT_TOKENS, num_tokens, vocab_size)
    rng = random.Random(streams)
    drawn = workload == "random"
    return [
        EngineRequest(
            f"{workload}-{index}",
            [rng.randrange(*VOCABULARY) for _ in range(PROMPT_TOKENS)],
            SamplingParams(temperature=float(drawn), seed=index, max_tokens=num_tokens, ignore_eos=True),
        )
        for index in range(streams)
    ]


def _with_prediction(request: EngineRequest, answer: GenericSequence[int]) -> EngineRequest:
    """Return the request with its answer as the prediction, of which some tokens are replaced."""
    edited = [
        token_id ^ 1 if index % EDITED_EVERY == EDITED_EVERY - 1 else token_id for index, token_id in enumerate(answer)
    ]
    return EngineRequest(request.request_id, request.prompt_token_ids, request.params, prediction_token_ids=edited)


def _decode(
    engine: Engine, requests: GenericSequence[EngineRequest], drafter: Drafter | None, *, from_start: bool = False
) -> tuple[dict[str, list[int]], _Speed]:
    """Return the answers, and the speed after all have their first token.

    Args:
        from_start: whether there are drafts before that too, so that a draft model follows the prompts.
    """
    engine.scheduler.drafter = drafter if from_start else None
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}

    def step() -> None:
        for output in engine.step():
            answers[output.request_id] += output.token_ids

    for request in requests:
        engine.add_request(request)
    while not all(answers.values()):
        step()
    engine.scheduler.drafter = drafter
    num_known, started, cpu_started = sum(map(len, answers.values())), perf_counter(), process_time()
    while engine.has_unfinished:
        step()
    num_tokens = sum(map(len, answers.values())) - num_known
    return answers, _Speed(num_tokens / (perf_counter() - started), num_tokens / (process_time() - cpu_started))


def main(arguments: GenericSequence[str] | None = None) -> None:
    """Measure all workloads, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser)
    parser.add_argument("--draft-model", help="directory of a checkpoint with the same vocabulary")
    parser.add_argument("--workloads", nargs="+", choices=(*WORKLOADS, *DRAFT_MODEL), help="default: all that can be")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--draft-tokens", type=int, default=8, help="num_speculative_tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    method = {"method": "ngram"}
    if options.draft_model:
        method = {"method": "draft_model", "model": options.draft_model}
    config = EngineConfig.from_options(
        options.model,
        engine_options(options)
        | {"speculative_config": {**method, "num_speculative_tokens": options.draft_tokens}}
        | {"enable_prefix_caching": False},
    )
    engine = Engine.from_config(config)
    gains = []
    for streams in options.streams:
        for workload in options.workloads or (DRAFT_MODEL if options.draft_model else WORKLOADS):
            gain = measure(engine, workload, streams, options.tokens, options.repeats)
            print(gain, flush=True)
            gains.append(asdict(gain))
            document: dict[str, Any] = {"machine": describe(torch.device(engine.info.device))}
            document["model"] = Path(options.model).name
            if (model := engine.runner.draft_model) is not None:
                document |= {"draft_model": Path(options.draft_model).name, "share_of_bytes": round(model.share, 3)}
            sizes = {"tokens": options.tokens, "draft_tokens": options.draft_tokens, "repeats": options.repeats}
            write_result(options.out, document | sizes | {"dtype": engine.info.dtype, "results": gains})
    engine.close()


if __name__ == "__main__":
    main()
