"""`python -m benchmarks.batch_model`: what a batch and clients that always stream can have together, by a model.

The model is one engine whose step takes ``base + sequence * sequences + prompt token * tokens``, and a pause between
two steps, with 15% of noise. Clients send their next request some milliseconds after their last answer. The lines of
the batch start and are paused by the server's own BackgroundGate, on the model's clock. So the figures need no quiet
machine; the costs are those of the demo model on one core (`benchmarks.step_costs`).
"""

from __future__ import annotations

import argparse
import heapq
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.result_file import write_result
from deployments.requests.background_gate import BACKGROUND_PRIORITY, BackgroundGate
from deployments.routing.cluster_view import ClusterView
from deployments.transport.request_channel.dispatch import Dispatch
from engine.observability.load import EngineLoad
from engine.observability.step_costs import StepCosts
from engine.request import EngineRequest

COSTS = StepCosts(base_s=0.25e-3, prefill_token_s=33e-6, sequence_s=31e-6, kv_token_s=0.0)
PROMPT_TOKENS, ANSWER_TOKENS = 32, 48
MOST_LINES = 48  # three quarters of 64 slots
LOOK_S = 0.1  # after which the dispatcher checks its limits again, if nothing ends
NOISE = 0.15
REPLICA = "engine"


@dataclass(slots=True)
class Answer:
    """One answer that the engine generates.

    Attributes:
        sent: when the request arrived.
        prompt: tokens to compute before its next token.
        num_left: tokens to generate.
        last: when the last token came.
        dispatch: of a line of the batch; None for a client's request.
    """

    sent: float
    prompt: int = PROMPT_TOKENS
    num_left: int = ANSWER_TOKENS
    last: float | None = None
    dispatch: Dispatch | None = None


@dataclass
class Result:
    """What the clients and the batch had."""

    seconds: float = 0.0
    client_tokens: int = 0
    batch_tokens: int = 0
    first_s: list[float] = field(default_factory=list)  # clients' times to first token
    gaps_s: list[float] = field(default_factory=list)  # between two tokens of a client's answer

    def figures(self) -> dict[str, float]:
        """Return tokens a second and milliseconds."""
        figures = {
            "all_tokens": (self.client_tokens + self.batch_tokens) / self.seconds,
            "client_tokens": self.client_tokens / self.seconds,
        }
        for name, values in (("ttft", self.first_s), ("itl", self.gaps_s)):
            for share in (50, 99):
                figures[f"{name}_p{share}"] = 1e3 * float(np.percentile(values, share)) if values else 0.0
        return figures


class Model:
    """One engine with clients and a batch.

    Args:
        num_clients: that stream; 0: none.
        max_slowdown: of the gate; None: there is no batch.
        think_s: mean seconds between an answer's end and the arrival of its client's next request.
        pause_s: between two steps.
        seed: of the noise.
    """

    def __init__(
        self, num_clients: int, max_slowdown: float | None, think_s: float, pause_s: float = 0.2e-3, seed: int = 0
    ) -> None:
        self.now = 0.0
        self.result = Result()
        self._rng = random.Random(seed)
        self._think_s, self._pause_s = think_s, pause_s
        self._has_batch = max_slowdown is not None
        self._view = ClusterView(clock=lambda: 0.0)
        self._view.set_replicas({REPLICA: {"block_size": 16}})
        self._gate = BackgroundGate(self._view, MOST_LINES, lambda: self.now, max_slowdown or 1.0)
        self._arrivals = [self._rng.random() * 0.05 for _ in range(num_clients)]
        heapq.heapify(self._arrivals)
        self._clients: list[Answer] = []
        self._lines: list[Answer] = []
        self._paused: list[Answer] = []
        self._look_at = 0.0

    def run(self, seconds: float) -> Result:
        """Let time go by; the first second does not count."""
        while self.now < seconds + 1:
            if self.now < 1:
                self.result = Result()
            self._receive()
            if self._has_batch and self.now >= self._look_at:
                self._look()
            if self._clients or self._lines:
                self._step()
            else:
                self.now = max(self.now, min([*self._arrivals, self._look_at if self._has_batch else seconds + 1]))
        self.result.seconds = self.now - 1
        return self.result

    def _receive(self) -> None:
        while self._arrivals and self._arrivals[0] <= self.now:
            answer = Answer(heapq.heappop(self._arrivals))
            self._clients.append(answer)
            self._look_at = self.now

    def _look(self) -> None:
        """Pause and start lines as the dispatcher does."""
        self._look_at = self.now + LOOK_S
        decoding = [answer for answer in [*self._clients, *self._lines] if not answer.prompt]
        load = EngineLoad(0, 0, 0, 1000, 900, 1e4, 0, num_decoding=len(decoding), step_costs=COSTS)
        self._view.routing.report(REPLICA, load, now=0.0)
        excess = set(map(id, self._gate.excess(REPLICA, len(self._clients))))
        for line in [line for line in self._lines if id(line.dispatch) in excess]:
            assert line.dispatch is not None
            self._gate.ended(line.dispatch)
            self._lines.remove(line)
            self._paused.append(line)
        while self._gate.has_room(REPLICA, len(self._clients)):
            line = self._paused.pop() if self._paused else Answer(self.now)
            line.prompt = PROMPT_TOKENS + ANSWER_TOKENS - line.num_left
            line.dispatch = self._dispatch(line)
            self._gate.sent(line.dispatch, len(self._clients))
            self._lines.append(line)

    def _dispatch(self, answer: Answer) -> Dispatch:
        request = EngineRequest("", [0], priority=BACKGROUND_PRIORITY)
        return Dispatch(request, replica=REPLICA, num_uncached_tokens=answer.prompt)

    def _step(self) -> None:
        """Give each answer a token, and compute the prompts that have come."""
        answers = [*self._clients, *self._lines]
        num_prompt = sum(answer.prompt for answer in answers)
        num_decoding = sum(not answer.prompt for answer in answers)
        step_s = COSTS.base_s + COSTS.sequence_s * num_decoding + COSTS.prefill_token_s * num_prompt
        self.now += (step_s + self._pause_s) * self._rng.lognormvariate(0, NOISE)
        for answer in answers:
            answer.prompt, answer.num_left = 0, answer.num_left - 1
            if answer.dispatch is not None:
                self.result.batch_tokens += 1
            elif answer.last is None:
                self.result.first_s.append(self.now - answer.sent)
            else:
                self.result.gaps_s.append(self.now - answer.last)
                self._gate.gaps_of(REPLICA).add(self.now - answer.last)
            answer.last = self.now
        self.result.client_tokens += len(self._clients)
        self._end(answers)

    def _end(self, answers: list[Answer]) -> None:
        for answer in [answer for answer in answers if not answer.num_left]:
            self._look_at = self.now
            if answer.dispatch is None:
                self._clients.remove(answer)
                heapq.heappush(self._arrivals, self.now + self._think_s * self._rng.lognormvariate(0, 0.3))
            else:
                self._lines.remove(answer)
                self._gate.ended(answer.dispatch)


def compare(num_clients: int, max_slowdown: float, think_s: float, seconds: float) -> dict[str, float]:
    """Return ratios for clients and batch together: of ``all_tokens`` to the batch alone, of others to clients alone.

    ``clients_alone`` is the ratio of the tokens of the clients alone to those of the batch alone.
    """
    alone = Model(num_clients, None, think_s).run(seconds).figures()
    batch = Model(0, max_slowdown, think_s).run(seconds).figures()
    both = Model(num_clients, max_slowdown, think_s).run(seconds).figures()
    ratios = {name: both[name] / alone[name] for name in alone if name != "all_tokens"}
    ratios["all_tokens"] = both["all_tokens"] / batch["all_tokens"]
    ratios["clients_alone"] = alone["all_tokens"] / batch["all_tokens"]
    return {name: round(ratio, 2) for name, ratio in ratios.items()}


def main() -> None:
    """Print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--slowdowns", type=float, nargs="+", default=[1.05, 1.1, 1.25, 1.5, 2.0, 3.0])
    parser.add_argument("--think-ms", type=float, nargs="+", default=[3.0, 10.0, 30.0, 300.0])
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for think_ms in arguments.think_ms:
        for slowdown in arguments.slowdowns:
            ratios = compare(arguments.clients, slowdown, think_ms / 1e3, arguments.seconds)
            rows.append({"think_ms": think_ms, "max_slowdown": slowdown, **ratios})
            print(rows[-1], flush=True)
    if arguments.out:
        write_result(arguments.out, {"clients": arguments.clients, "seconds": arguments.seconds, "rows": rows})


if __name__ == "__main__":
    main()
