"""The workloads are the same on every machine, so that results can be compared."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.workloads import Request, Workload, load, main, make


def test_workloads_have_the_documented_sizes() -> None:
    sizes = {name: make(name) for name in ("w1", "w16", "wshare", "p2048")}
    assert {
        name: (len(workload.requests), workload.input_tokens, workload.output_tokens)
        for name, workload in sizes.items()
    } == {
        "w1": (1, 64, 64),
        "w16": (16, 2199, 1381),
        "wshare": (16, 16761, 384),
        "p2048": (1, 2048, 1),
    }
    assert [sizes[name].shared_prefix for name in ("w1", "w16", "wshare")] == [0, 0, 1024]


def test_ids_are_drawn_in_the_documented_order() -> None:
    rng = random.Random(0)
    length = rng.randint(50, 256)
    prompt = [rng.randrange(10, 2000) for _ in range(length)]
    assert make("w16").requests[0] == Request(prompt, rng.randint(32, 128))


def test_a_written_file_is_read_back(tmp_path: Path) -> None:
    main(["w16", "--directory", str(tmp_path)])
    written = json.loads((tmp_path / "w16.json").read_text())
    assert set(written) == {"requests"}
    assert set(written["requests"][0]) == {"prompt", "out"}
    assert load(str(tmp_path / "w16.json")) == load("w16") == make("w16")


def test_a_shifted_workload_is_the_same_work_without_a_common_prefix() -> None:
    workload, shifted = make("w1"), make("w16").shifted(1)
    assert workload.requests[0].prompt[:8] == make("w16").requests[0].prompt[:8]  # why they are shifted at all
    assert workload.requests[0].prompt[0] != shifted.requests[0].prompt[0]
    assert shifted.input_tokens == make("w16").input_tokens


def test_a_shared_prefix_may_be_the_shortest_prompt() -> None:
    assert Workload("x", [Request([1, 2], 1), Request([1, 2, 3], 1)]).shared_prefix == 2
    assert Workload("x", [Request([1, 2], 1), Request([4, 2, 3], 1)]).shared_prefix == 0


def test_an_unknown_workload_is_rejected() -> None:
    with pytest.raises(ValueError, match="'w17' is not a workload; give a file or one of w1, w16, wshare, p2048"):
        load("w17")
