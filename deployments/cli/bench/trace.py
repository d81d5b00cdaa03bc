"""read_trace: the requests of a trace in Mooncake's form: arrival, lengths, and the blocks that prompts share.

A line is ``{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [ids of blocks of 512 tokens]}``, as in
the traces of R. Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

__all__ = ["BLOCK_SIZE", "TraceRequest", "read_lines", "read_trace"]

BLOCK_SIZE = 512  # tokens


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace."""

    at_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]  # equal ids: equal tokens; the last block may be a part of one


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file.

    Raises:
        ConfigError: it cannot be read, is empty, or a line is not a JSON object.
    """
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})"
        raise ConfigError(problem, param="FILE", value=str(path), remedy="give a JSONL file") from None
    lines = []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise ConfigError(f"{path}, line {number} is not a JSON object; give one request a line")
        lines.append(line)
    if not lines:
        raise ConfigError(f"{path} has no requests; give one JSON object a line")
    return lines


def read_trace(path: Path) -> list[TraceRequest]:
    """Return the requests in the order of their arrival.

    Raises:
        ConfigError: as ``read_lines``, or a line lacks a field.
    """
    requests = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            blocks = tuple(int(block) for block in line.get("hash_ids", ()))
            lengths = int(line["input_length"]), int(line["output_length"])
            requests.append(TraceRequest(float(line["timestamp"]) / 1000, *lengths, blocks))
        except (LookupError, TypeError, ValueError) as error:
            remedy = "give timestamp (ms), input_length and output_length, and hash_ids if prompts share blocks"
            raise ConfigError(f"{path}, request {number} is malformed ({error!r}); {remedy}") from None
    return sorted(requests, key=lambda request: request.at_s)
