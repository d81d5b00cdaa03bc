"""`python -m benchmarks.failover`: engines are killed under streams with long prompts, with KV tiers and without.

32 clients each ask one question of a thousand tokens, again and again, under another cache salt each time, so that no
prompt is cached. Every 10 s an engine is killed (SIGKILL), which Serve starts again. First each question is asked once
undisturbed: every later answer must have the same tokens. With tiers, a neighbour copies the KV of each stream while it
is computed (``router.kv_replication``). Clients, server and restarts share this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.machine import describe
from benchmarks.result_file import write_result
from benchmarks.serving.server import Server, serve
from deployments.launcher.direct import direct_urlopen

ENGINES, CLIENTS = 4, 32
PROMPT_TOKENS = 1000
ANSWER_TOKENS = (400, 1000)  # drawn for each client, so that prompts do not come at the same time
REPLICATION = 64  # tokens between two copies
KILL_EVERY_S = 10.0
LAST_TRIES = 5
LEAST_INTERRUPTED = 10  # streams of each server, for quantiles of their gaps
VOCABULARY = range(10, 3000)
RESUMED = "pagoda_resumed_tokens_total"
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Question:
    """What one client asks."""

    client: int
    prompt: list[int]
    num_tokens: int  # of the answer


@dataclass(slots=True)
class Answer:
    """One stream; times are those of ``perf_counter``."""

    client: int
    replica: str = ""  # that began it
    error: str = ""
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)

    def gap_at(self, moment: float) -> float | None:
        """Return the gap between the events before and after a moment; None if there are none."""
        before = [at for at in self.arrivals if at <= moment]
        after = [at for at in self.arrivals if at > moment]
        return after[0] - before[-1] if before and after else None


@dataclass(frozen=True)
class Result:
    """The figures of one server.

    Attributes:
        kills: engines that were killed.
        answers: complete ones.
        failed: streams that ended with an error.
        different: complete answers with other tokens than the undisturbed ones.
        interrupted: streams that the killed engines computed.
        restored: tokens of streams that moved whose KV was not computed again, as the engines count them.
        recomputed: and those that were.
        gap_p50_s: of interrupted streams: between the last event before the kill and the next one.
    """

    server: str
    kills: int
    answers: int
    failed: int
    different: int
    interrupted: int
    restored: int
    recomputed: int
    gap_p50_s: float
    gap_p99_s: float
    tokens_per_s: float
    errors: list[str]


class Watch(threading.Thread):
    """Reads the engines' metrics, because what an engine has restored is lost when it is killed."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._seen: dict[tuple[str, str], float] = {}  # replica, kv -> tokens
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(POLL_S):
            self.read()

    def read(self) -> bool:
        """Read the metrics once; return whether the server has answered."""
        try:
            with direct_urlopen(f"{self._url}/metrics", timeout=10) as answer:
                families = list(text_string_to_metric_families(answer.read().decode()))
        except (OSError, HTTPException):
            return False
        samples = [sample for family in families for sample in family.samples if sample.name == RESUMED]
        for sample in samples:
            self._seen[sample.labels["replica"], sample.labels["kv"]] = sample.value
        return True

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self.join()
        if not any(self.read() for _ in range(LAST_TRIES)):
            raise RuntimeError("the server answers no more")

    def tokens(self, kv: str) -> int:
        """Return the tokens of streams that moved which were ``restored`` or ``recomputed``."""
        return int(sum(value for (_, kind), value in self._seen.items() if kind == kv))


async def ask(session: aiohttp.ClientSession, url: str, question: Question, salt: str) -> Answer:
    """Send a question and read its stream to the end."""
    answer, lines = Answer(question.client), list[bytes]()
    body = {"prompt": question.prompt, "max_tokens": question.num_tokens, "ignore_eos": True, "temperature": 0}
    try:
        body |= {"stream": True, "return_token_ids": True, "cache_salt": salt}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer.replica = response.headers.get("x-pagoda-replica", "")
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:200]}"
            async for line in response.content:
                if line.startswith(b"data: {"):
                    answer.arrivals.append(perf_counter())
                    lines.append(line[6:])
                elif line.startswith(b"data: [DONE]"):
                    break
    except aiohttp.ClientError as error:
        answer.error = repr(error)
    for line in lines:
        event = json.loads(line)
        if "error" in event:
            answer.error = answer.error or json.dumps(event["error"])
        for choice in event.get("choices", ()):
            answer.tokens += choice.get("token_ids") or ()
    if not answer.error and len(answer.tokens) != question.num_tokens:
        answer.error = f"{len(answer.tokens)} tokens"
    return answer


async def ask_until(session: aiohttp.ClientSession, url: str, question: Question, end: float) -> list[Answer]:
    """Ask one question again and again."""
    answers = list[Answer]()
    while perf_counter() < end:
        answers.append(await ask(session, url, question, f"{question.client} {len(answers)}"))
    return answers


async def kill_engines(server: Server, engines: dict[str, int], times: Sequence[float], seed: int) -> dict[str, float]:
    """Kill one engine at each of these times; return when which replica was killed.

    Ray's dashboard, which knows the processes, is slow while they are busy: it is asked before the load and
    between the kills.
    """
    source, killed = random.Random(seed), dict[str, float]()
    for moment in times:
        await asyncio.sleep(max(0.0, moment - perf_counter()))
        replica = source.choice(sorted(engines.keys() - killed.keys()))
        killed[replica] = perf_counter()
        os.kill(engines[replica], signal.SIGKILL)
        if moment != times[-1]:
            engines |= await asyncio.to_thread(server.engines)
    return killed


async def run(server: Server, seconds: float, seed: int) -> tuple[list[Answer], list[Answer], dict[str, float]]:
    """Return the undisturbed answers, those under kills, and when engines were killed."""
    source, engines = random.Random(seed), server.engines()
    questions = [
        Question(number, source.choices(VOCABULARY, k=PROMPT_TOKENS), source.randint(*ANSWER_TOKENS))
        for number in range(CLIENTS)
    ]
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout
    ) as session:
        undisturbed = await asyncio.gather(*(ask(session, server.url, item, "undisturbed") for item in questions))
        began = perf_counter()
        times = np.arange(began + KILL_EVERY_S / 2, began + seconds, KILL_EVERY_S)
        killing = asyncio.create_task(kill_engines(server, engines, [float(moment) for moment in times], seed))
        end = began + seconds
        answers = await asyncio.gather(*(ask_until(session, server.url, item, end) for item in questions))
        kills = await killing
    return undisturbed, [answer for of_client in answers for answer in of_client], kills


def measure(name: str, server: Server, seconds: float, seed: int) -> Result:
    """Run the load on a fresh server."""
    watch = Watch(server.url)
    watch.start()
    undisturbed, answers, kills = asyncio.run(run(server, seconds, seed))
    watch.close()
    expected = [answer.tokens for answer in undisturbed]
    assert all(not answer.error for answer in undisturbed), undisturbed[0].error
    complete = [answer for answer in answers if not answer.error]
    gaps = interrupted_gaps(answers, kills)
    began = min(answer.arrivals[0] for answer in complete)
    ended = max(answer.arrivals[-1] for answer in complete)
    return Result(
        server=name,
        kills=len(kills),
        answers=len(complete),
        failed=len(answers) - len(complete),
        different=sum(answer.tokens != expected[answer.client] for answer in complete),
        interrupted=len(gaps),
        restored=watch.tokens("restored"),
        recomputed=watch.tokens("recomputed"),
        gap_p50_s=float(np.percentile(gaps or [np.nan], 50)),
        gap_p99_s=float(np.percentile(gaps or [np.nan], 99)),
        tokens_per_s=sum(len(answer.tokens) for answer in complete) / (ended - began),
        errors=sorted({answer.error for answer in answers if answer.error})[:5],
    )


def interrupted_gaps(answers: Sequence[Answer], killed_at: dict[str, float]) -> list[float]:
    """Return the gap of each stream whose first replica was killed while it answered."""
    gaps = (answer.gap_at(killed_at[answer.replica]) for answer in answers if answer.replica in killed_at)
    return [gap for gap in gaps if gap is not None]


def _setting(*, tiers: bool) -> Any:
    def change(args: dict[str, Any]) -> None:
        args["replicas"] |= {"num_engine_replicas": ENGINES, "cpus_per_engine": 0.1, "cpus_per_ingress": 0.1}
        args["limits"] |= {"max_migrations": 100}
        if tiers:
            args["router"] |= {"kv_replication": REPLICATION}
        else:
            args["engine"] |= {"kv_transfer": False, "swap_space_gib": 0}

    return change


def print_goals(tiered: Result, plain: Result) -> None:
    """Print which goals hold, where enough streams were interrupted to tell."""
    print(f"failed: {tiered.failed} (goal: 0); with other tokens: {tiered.different} (goal: 0)")
    if min(tiered.interrupted, plain.interrupted) < LEAST_INTERRUPTED or not plain.recomputed:
        print(f"{tiered.interrupted} and {plain.interrupted} streams were interrupted: too few for the other goals")
        return
    share = [result.recomputed / (result.restored + result.recomputed) for result in (tiered, plain)]
    print(f"computed again, of the tokens of streams that moved: {share[0]:.3f}, without tiers {share[1]:.3f}")
    print(f"computed again, against without: {share[0] / share[1]:.3f} (goal: at most 0.2)")
    print(f"gap p99 against without: {tiered.gap_p99_s / plain.gap_p99_s:.2f} (goal: at most 0.5)")


def main() -> None:
    """Measure both servers, and print what holds of the goals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    results, load_average = [], os.getloadavg()[0]  # of other work: it decides what gaps mean
    for name, tiers in (("with tiers", True), ("without", False)):
        with serve(_setting(tiers=tiers), engines=ENGINES) as server:
            results.append(measure(name, server, arguments.seconds, arguments.seed))
        print(json.dumps(asdict(results[-1])), flush=True)
    print_goals(*results)
    if arguments.out:
        document: dict[str, Any] = {"machine": describe(torch.device("cpu"))}
        document |= {"prompt_tokens": PROMPT_TOKENS, "answer_tokens": ANSWER_TOKENS, "replication": REPLICATION}
        document["load_average"] = load_average
        document["results"] = [asdict(result) for result in results]
        write_result(arguments.out, document)


if __name__ == "__main__":
    main()
