"""What `pagoda bench` sends: sessions of one or more turns, from a JSONL file, a trace, or drawn at random."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from deployments.cli.bench.prompts import random_ids
from deployments.cli.bench.trace import BLOCK_SIZE, TraceRequest, read_lines, read_trace
from engine.errors import ConfigError

__all__ = ["Generated", "Length", "Session", "Workload", "generated", "of_file", "of_trace", "parse_length"]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(slots=True)
class Session:
    """Requests of one client, each after the answer to the one before.

    Attributes:
        path: of the endpoint.
        body: of the first request, without the model.
        at_s: when it arrives; None: when the rate or a free client says.
        later: token ids that each later turn adds after the answer, and the tokens to generate.
    """

    path: str
    body: dict[str, Any]
    at_s: float | None = None
    later: list[tuple[list[int], int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions, which are made when they are sent.

    Attributes:
        num_requests: in all of them.
        has_times: whether they have arrival times.
    """

    sessions: Iterator[Session]
    num_requests: int
    has_times: bool = False


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens, drawn uniformly from a range that includes both ends."""

    least: int
    most: int

    def draw(self, rng: random.Random) -> int:
        """Return a number of tokens."""
        return rng.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class Generated:
    """How to draw sessions; all lengths are in tokens.

    Attributes:
        prompt: of each turn, beside the shared prefix and the earlier turns.
        output: of each answer, which is exactly as long.
        num_prefixes: different prefixes; session i has prefix i modulo this number. 0: none.
        prefix_tokens: of each.
        turns: of a session. The prompt of each begins with the one before and its answer.
    """

    prompt: Length
    output: Length
    num_prefixes: int = 0
    prefix_tokens: int = 0
    turns: int = 1


def parse_length(text: str) -> Length:
    """Return the length ``N`` or the range ``LEAST:MOST``.

    Raises:
        ConfigError: it is neither.
    """
    least, _, most = text.partition(":")
    if not (least.isdecimal() and (most or least).isdecimal()) or not 1 <= int(least) <= int(most or least):
        raise ConfigError("is not a length", param="tokens", value=text, remedy="give a number, or a range as 50:200")
    return Length(int(least), int(most or least))


def generated(shape: Generated, number: int, seed: int) -> Workload:
    """Return ``number`` sessions; the same seed gives the same ones."""
    return Workload(_generate(shape, number, seed), number * shape.turns)


def _generate(shape: Generated, number: int, seed: int) -> Iterator[Session]:
    prefixes = [random_ids(random.Random(f"{seed} prefix {i}"), shape.prefix_tokens) for i in range(shape.num_prefixes)]
    for index in range(number):
        rng = random.Random(f"{seed} session {index}")
        turns = [(random_ids(rng, shape.prompt.draw(rng)), shape.output.draw(rng)) for _ in range(shape.turns)]
        prefix = prefixes[index % len(prefixes)] if prefixes else []
        body = _completion(prefix + turns[0][0], turns[0][1])
        yield Session(COMPLETIONS, body, later=turns[1:])


def of_trace(path: Path, *, scale: float, speed: float, number: int | None) -> Workload:
    """Return the requests of a trace with their arrival times.

    Args:
        path: of the trace.
        scale: of all lengths, blocks included.
        speed: how many times faster requests arrive.
        number: of requests; None: all.

    Raises:
        ConfigError: as ``read_trace``.
    """
    requests = read_trace(path)[:number]
    return Workload(_replay(requests, scale, speed), len(requests), has_times=True)


def _replay(requests: list[TraceRequest], scale: float, speed: float) -> Iterator[Session]:
    block_tokens = max(1, round(BLOCK_SIZE * scale))

    @lru_cache(maxsize=4096)
    def block(block_id: int) -> list[int]:
        return random_ids(random.Random(f"block {block_id}"), block_tokens)

    for index, request in enumerate(requests):
        length = max(1, round(request.input_tokens * scale))
        ids = [token for block_id in request.block_ids for token in block(block_id)][:length]
        ids += random_ids(random.Random(f"rest {index}"), length - len(ids))
        output = max(1, round(request.output_tokens * scale))
        yield Session(COMPLETIONS, _completion(ids, output), (request.at_s - requests[0].at_s) / speed)


def of_file(path: Path, *, speed: float, number: int | None, max_tokens: int) -> Workload:
    """Return the requests of a JSONL file: bodies of chat or completion requests.

    Args:
        path: of the file. A line has ``messages`` or ``prompt``, and may have ``timestamp`` (ms), when it arrives.
        speed: how many times faster they arrive.
        number: of requests; None: all. A shorter file without times is repeated.
        max_tokens: of those that say none.

    Raises:
        ConfigError: as ``read_lines``; a line has neither of them, or only some have a time.
    """
    lines = read_lines(path)
    for index, line in enumerate(lines, 1):
        if ("messages" in line) == ("prompt" in line):
            remedy = "give one of them, as in a request's body"
            raise ConfigError(f"{path}, request {index} has neither or both of 'messages' and 'prompt'; {remedy}")
    times = [line["timestamp"] for line in lines if "timestamp" in line]
    if not all(isinstance(time, int | float) for time in times) or len(times) not in (0, len(lines)):
        raise ConfigError(f"{path}: only some requests have a 'timestamp' in milliseconds; give it to all or to none")
    if times:
        lines = sorted(lines, key=lambda line: line["timestamp"])[:number]
    elif number is not None:
        lines = (lines * -(-number // len(lines)))[:number]
    return Workload(_read(lines, speed, max_tokens), len(lines), has_times=bool(times))


def _read(lines: list[dict[str, Any]], speed: float, max_tokens: int) -> Iterator[Session]:
    for line in lines:
        body = {name: value for name, value in line.items() if name != "timestamp"}
        if not {"max_tokens", "max_completion_tokens"} & body.keys():
            body["max_tokens"] = max_tokens
        at_s = (line["timestamp"] - lines[0]["timestamp"]) / 1000 / speed if "timestamp" in line else None
        yield Session(CHAT if "messages" in body else COMPLETIONS, body, at_s)


def _completion(ids: list[int], output: int) -> dict[str, Any]:
    return {"prompt": ids, "max_tokens": output, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
