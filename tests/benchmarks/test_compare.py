"""The comparison's own logic: order, medians, ratios, and what happens when a peer fails. The runners are fakes."""

from __future__ import annotations

import sys

import pytest

from benchmarks import compare as module
from benchmarks.compare import Contestant, compare, parse_peer, parse_results, summarize, table
from benchmarks.limits.model_shape import ModelShape
from benchmarks.limits.rates import Rates
from benchmarks.limits.roofline import Roofline
from benchmarks.workloads import Request, Workload

WORKLOADS = [Workload("a", [Request([1, 2], 4)]), Workload("b", [Request([3], 2)])]
OURS, PEER = Contestant("pagoda", []), Contestant("vllm", [])


def _roofline() -> Roofline:
    return Roofline(ModelShape(2, 3, 1, 1, 1, 2, 5), Rates(1.0, {1: 1.0}))


class FakeRuns:
    """Answers with the rates that it was given for an engine, one run after the other."""

    def __init__(self, rates: dict[str, list[float]]) -> None:
        self.rates = rates
        self.asked: list[str] = []

    def __call__(self, contestant: Contestant, files: list[str]) -> list[module.Result]:
        self.asked.append(contestant.name)
        left = self.rates[contestant.name]
        if not left:
            raise RuntimeError("no more")
        rate = left.pop(0)
        return [{"workload": name, "output_tokens_per_s": rate, "load_s": 1.0} for name in files]


def test_engines_alternate_and_the_median_counts() -> None:
    fake = FakeRuns({"pagoda": [10.0, 30.0, 20.0], "vllm": [5.0, 5.0, 40.0]})
    runs = compare([OURS, PEER], ["a", "b"], 3, fake)
    assert fake.asked == ["pagoda", "vllm"] * 3
    summary = summarize(runs, WORKLOADS, _roofline())
    ours, peer = summary["a"]["pagoda"], summary["a"]["vllm"]
    assert (ours["lowest"], ours["output_tokens_per_s"], ours["highest"]) == (10.0, 20.0, 30.0)
    assert (ours["ours_over_this"], peer["ours_over_this"]) == (1.0, 4.0)
    assert ours["share_of_limit"] == pytest.approx(20.0 / _roofline().limit(WORKLOADS[0]).tokens_per_s, abs=0.001)


def test_a_failing_peer_is_left_out_and_the_others_continue(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeRuns({"pagoda": [10.0, 10.0, 10.0], "vllm": [5.0]})
    runs = compare([OURS, PEER], ["a", "b"], 3, fake)
    assert fake.asked == ["pagoda", "vllm", "pagoda", "vllm", "pagoda"]
    assert list(runs) == ["pagoda"]
    assert "vllm is left out: no more" in capsys.readouterr().err


def test_the_table_has_a_line_for_each_engine_and_the_limit() -> None:
    runs = compare([OURS, PEER], ["a", "b"], 1, FakeRuns({"pagoda": [12.0], "vllm": [6.0]}))
    lines = table(summarize(runs, WORKLOADS, _roofline()), {"a": 99.5, "b": 1.0}).splitlines()
    assert len(lines) == 1 + 2 * 3
    assert lines[2].split()[:5] == ["a", "vllm", "6.00", "6.00", "6.00"]
    assert lines[2].split()[-2:] == ["2.00", "1.0"]
    assert lines[3].split() == ["a", "limit", "99.5"]


def test_without_a_limit_the_table_has_none() -> None:
    summary = summarize(compare([OURS], ["a", "b"], 1, FakeRuns({"pagoda": [12.0]})), WORKLOADS, None)
    assert summary["a"]["pagoda"]["share_of_limit"] is None
    lines = table(summary, {}).splitlines()
    assert len(lines) == 1 + 2
    assert lines[1].split() == ["a", "pagoda", "12.00", "12.00", "12.00", "-", "1.00", "1.0"]


def test_results_are_found_in_the_output_of_an_engine() -> None:
    output = 'WARNING {x}\n{"a": 1}\n{"workload": "a", "output_tokens_per_s": 2.5, "load_s": 1}\nbye'
    assert parse_results(output) == [{"workload": "a", "output_tokens_per_s": 2.5, "load_s": 1}]


def test_a_peer_is_named_with_its_python_and_its_form_of_the_checkpoint() -> None:
    assert parse_peer("vllm=bin/python", "dir").command == ["bin/python", "-m", "benchmarks.peers.vllm", "dir"]
    assert parse_peer("llamacpp=p,m.gguf", "dir").command == ["p", "-m", "benchmarks.peers.llamacpp", "m.gguf"]
    for text in ("vllm", "vllm=", "other=python"):
        with pytest.raises(ValueError, match="is not NAME=PYTHON"):
            parse_peer(text, "dir")


def test_a_failing_process_raises_an_error_with_its_stderr() -> None:
    program = "import sys; sys.exit('out of luck')"
    with pytest.raises(RuntimeError, match=r"vllm ended with code 1:\nout of luck"):
        module.run(Contestant("vllm", [sys.executable, "-c", program]), ["w1.json"])
