"""`python -m benchmarks.start_and_stop`: seconds until a server is ready, and from an interrupt until it has ended.

The servers come one after the other, each with two engines of the demo model. Most of the time is of Ray's processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.serving.server import serve

ENGINES = 2


def start_and_stop() -> dict[str, float]:
    """Return the seconds of both for one server, to which no client is connected."""
    started = perf_counter()
    with serve(_change, engines=ENGINES):
        ready = perf_counter()
    return {"start_s": round(ready - started, 2), "stop_s": round(perf_counter() - ready, 2)}


def _change(args: dict[str, Any]) -> None:
    args["replicas"] |= {"num_engine_replicas": ENGINES}


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    servers = [start_and_stop() for _ in range(arguments.repeats)]
    medians = {name: statistics.median(times[name] for times in servers) for name in servers[0]}
    print(f"medians of {len(servers)} servers: {json.dumps(medians)}")
    if arguments.out:
        document = {"machine": describe(torch.device("cpu")), "medians": medians, "servers": servers}
        arguments.out.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
