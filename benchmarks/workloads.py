"""The offline workloads: prompts of random token ids, and the number of tokens to generate for each.

    python -m benchmarks.workloads w1 w16 wshare --directory DIR    # writes DIR/w1.json and so on

A file is ``{"requests": [{"prompt": [ids], "out": n}, ...]}``, which every engine's runner reads. The form is that of
nano-vllm's benchmark (uniform lengths, uniform ids), with lengths that a CPU can do. It needs nothing but the standard
library, as the module of the vocabulary does, so that a peer's own virtual environment can import it.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

from deployments.cli.bench.prompts import VOCABULARY

__all__ = ["SHAPES", "Request", "Shape", "Workload", "load", "make"]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and the number of tokens to generate."""

    prompt: list[int]
    out: int


@dataclass(frozen=True)
class Shape:
    """How to draw a workload; lengths are drawn uniformly from ranges that include both ends."""

    num_requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    shared_prefix: int = 0  # tokens that all prompts begin with, in addition to prompt_tokens


SHAPES = {
    "w1": Shape(1, (64, 64), (64, 64)),
    "w16": Shape(16, (50, 256), (32, 128)),
    "wshare": Shape(16, (16, 32), (16, 32), shared_prefix=1024),
    "p2048": Shape(1, (2048, 2048), (1, 1)),
}


@dataclass(frozen=True)
class Workload:
    """Requests that all arrive at the start."""

    name: str
    requests: list[Request]

    @property
    def input_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Tokens to generate for all requests."""
        return sum(request.out for request in self.requests)

    @property
    def shared_prefix(self) -> int:
        """Number of tokens that all prompts begin with; 0 for a single prompt."""
        if len(self.requests) < 2:
            return 0
        columns = zip(*(request.prompt for request in self.requests), strict=False)
        return next((position for position, ids in enumerate(columns) if len(set(ids)) > 1), self._shortest_prompt)

    @property
    def _shortest_prompt(self) -> int:
        return min(len(request.prompt) for request in self.requests)

    def shifted(self, by: int) -> Workload:
        """Return the workload with ``by`` added to every id: the same work without a common prefix."""
        requests = [Request([token_id + by for token_id in request.prompt], request.out) for request in self.requests]
        return Workload(self.name, requests)

    def write(self, path: Path) -> None:
        """Write the requests as JSON."""
        requests = [{"prompt": request.prompt, "out": request.out} for request in self.requests]
        path.write_text(json.dumps({"requests": requests}) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Workload:
        """Read a file written by ``write``; the file's stem is the name."""
        requests = json.loads(path.read_text(encoding="utf-8"))["requests"]
        return cls(path.stem, [Request(request["prompt"], request["out"]) for request in requests])


def make(name: str, seed: int = 0) -> Workload:
    """Draw the workload of that name: the prefix, then length, ids and answer of each request."""
    shape, rng = SHAPES[name], random.Random(seed)
    prefix = _ids(rng, shape.shared_prefix)
    requests = []
    for _ in range(shape.num_requests):
        prompt = prefix + _ids(rng, rng.randint(*shape.prompt_tokens))
        requests.append(Request(prompt, rng.randint(*shape.output_tokens)))
    return Workload(name, requests)


def load(name_or_path: str) -> Workload:
    """Return the workload of that name, or the one in that file.

    Raises:
        ValueError: if it is neither.
    """
    if name_or_path in SHAPES:
        return make(name_or_path)
    if not Path(name_or_path).is_file():
        raise ValueError(f"'{name_or_path}' is not a workload; give a file or one of {', '.join(SHAPES)}")
    return Workload.read(Path(name_or_path))


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(*VOCABULARY) for _ in range(count)]


def main(arguments: list[str] | None = None) -> None:
    """Write workloads and print their sizes."""
    parser = argparse.ArgumentParser(description="Write workloads as JSON.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHAPES)}; default: all")
    parser.add_argument("--directory", type=Path, default=Path())
    options = parser.parse_args(arguments)
    names = options.names or list(SHAPES)
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"'{unknown[0]}' is not a workload; choose from {', '.join(SHAPES)}")
    options.directory.mkdir(parents=True, exist_ok=True)
    print(f"{'workload':10} {'requests':>9} {'input tokens':>13} {'output tokens':>14}")
    for workload in map(make, names):
        workload.write(options.directory / f"{workload.name}.json")
        print(f"{workload.name:10} {len(workload.requests):9} {workload.input_tokens:13,} {workload.output_tokens:14,}")


if __name__ == "__main__":
    main()
