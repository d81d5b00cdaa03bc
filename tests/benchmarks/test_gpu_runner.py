"""The runner of the GPU check, with planted faults: one part's end must not touch the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.check import DEADLINE_S
from benchmarks.gpu.parts import CALLS, PARTS, with_needs
from benchmarks.gpu.run.part import Part, PartResults, read_results, write_json
from benchmarks.gpu.run.report import summary, to_document
from benchmarks.gpu.run.runner import PartOutcome, RunOptions, choose_allocator, passed_before, run_parts
from tests.waiting import HANG_S, until

ROOT = Path(__file__).parents[2]


def fault(name: str, limit_s: float = HANG_S, needs: tuple[str, ...] = ()) -> Part:
    return Part(name, f"tests.benchmarks.gpu_faults:{name}", 0.0, limit_s, needs)


def run(tmp_path: Path, *parts: Part, deadline_s: float = 10 * HANG_S) -> dict[str, PartOutcome]:
    documents: list[str] = []

    def check_json(outcomes: dict[str, PartOutcome]) -> None:
        write_json(tmp_path / "out.json", to_document(outcomes, seconds=1.0, complete=len(outcomes) == len(parts)))
        documents.append((tmp_path / "out.json").read_text())

    options = RunOptions(tmp_path, deadline_s, device="cpu", size="tiny", allocator=choose_allocator("cpu"))
    outcomes = run_parts(parts, options, check_json)
    assert len(documents) == len(parts)  # written after each part
    last = json.loads(documents[-1])
    assert list(last["parts"]) == [part.name for part in parts]
    assert last["passed"] == all(outcome.status == "passed" for outcome in outcomes.values())
    return outcomes


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("name", "expected", "output"),
    [
        ("raises", "RuntimeError: planted error", "gpu_faults.py"),
        ("finds_a_fault", "planted fault", ""),
        ("aborts", "SIGABRT", "last words"),
        ("segfaults", "SIGSEGV", "segfaults"),  # the name of the function, in the stack
        ("runs_out_of_memory", "MemoryError", "gpu_faults.py"),
        ("is_killed", "the kernel sends it when memory runs out", ""),
        ("exits", "did not come to its end", ""),
        ("records_nan", "ValueError", "gpu_faults.py"),
        ("writes_garbage", "cannot be read", ""),
        ("writes_other_json", "cannot be read", ""),
    ],
)
def test_a_fault_is_recorded_and_the_next_part_runs(tmp_path: Path, name: str, expected: str, output: str) -> None:
    outcomes = run(tmp_path, fault(name), fault("passes"))
    assert outcomes[name].status == "failed"
    assert expected in " ".join(outcomes[name].faults)
    assert output in outcomes[name].output_tail
    assert outcomes["passes"] == replace(outcomes["passes"], status="passed", figures={"figure": 1}, faults=[])
    assert outcomes[name].faults[0][:20] in summary(outcomes)


def test_figures_of_a_part_that_aborts_are_kept(tmp_path: Path) -> None:
    outcomes = run(tmp_path, fault("aborts"))
    assert outcomes["aborts"].figures == {"figure": 1}


def test_a_hanging_part_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = subprocess.Popen.wait

    def wait_until_it_hangs(process: subprocess.Popen[bytes], timeout: float) -> int:
        """Let the first part reach its limit when it hangs."""
        monkeypatch.setattr(subprocess.Popen, "wait", wait)
        until(lambda: "child" in read_results(tmp_path / "hangs_with_a_child.json")[0], "the part runs")
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_until_it_hangs)
    outcomes = run(tmp_path, fault("hangs_with_a_child", limit_s=20.0), fault("passes"))
    hanging = outcomes["hangs_with_a_child"]
    assert hanging.status == "failed"
    assert "more than 20 s" in hanging.faults[0]
    assert "in hangs_with_a_child" in hanging.output_tail  # where it hung
    until(lambda: not is_alive(hanging.figures["child"]), "the child has ended")
    assert outcomes["passes"].status == "passed"


def test_children_that_a_part_leaves_are_killed(tmp_path: Path) -> None:
    outcomes = run(tmp_path, fault("leaves_a_child"))
    assert outcomes["leaves_a_child"].status == "passed"
    until(lambda: not is_alive(outcomes["leaves_a_child"].figures["child"]), "the child has ended")


def test_parts_after_the_deadline_or_a_failed_need_do_not_run(tmp_path: Path) -> None:
    slow = replace(fault("passes"), name="slow", expected_s=1000.0)
    outcomes = run(tmp_path, slow, replace(fault("passes"), name="dependent", needs=("slow",)), deadline_s=100.0)
    assert [outcome.status for outcome in outcomes.values()] == ["not run", "not run"]
    assert "takes about 1000 s" in outcomes["slow"].faults[0]
    assert "needs 'slow'" in outcomes["dependent"].faults[0]
    assert not to_document(outcomes, seconds=1.0, complete=True)["passed"]


def test_the_deadline_shortens_the_last_parts_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, limits = 1000.0, []

    def take_four_seconds(part: Part, options: RunOptions, limit_s: float) -> PartOutcome:
        nonlocal now
        now += 4.0
        limits.append(limit_s)
        return PartOutcome("passed", 4.0, [], {})

    monkeypatch.setattr("benchmarks.gpu.run.runner.monotonic", lambda: now)
    monkeypatch.setattr("benchmarks.gpu.run.runner._run_part", take_four_seconds)
    run(tmp_path, fault("passes", limit_s=5.0), replace(fault("passes", limit_s=5.0), name="last"), deadline_s=6.0)
    assert limits == [5.0, 2.0]


def test_an_incomplete_run_has_not_passed(tmp_path: Path) -> None:
    outcomes = {"one": PartOutcome("passed", 1.0, [], {})}
    assert not to_document(outcomes, seconds=1.0, complete=False)["passed"]
    assert to_document(outcomes, seconds=1.0, complete=True)["passed"]


def test_sigterm_ends_the_run_and_its_part(tmp_path: Path) -> None:
    program = (
        "import benchmarks.gpu.check as check; from benchmarks.gpu.run.part import Part; "
        "hang = Part('hang', 'tests.benchmarks.gpu_faults:hangs_with_a_child', 0.0, 60.0); "
        "check.with_needs = lambda names, passed: [hang]; "
        f"check.main(['--device', 'cpu', '--out', {str(tmp_path / 'o.json')!r}, '--work', {str(tmp_path)!r}])"
    )
    run = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    until(lambda: "child" in read_results(tmp_path / "hang.json")[0], "the part runs")
    child = read_results(tmp_path / "hang.json")[0]["child"]
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=HANG_S) == 128 + signal.SIGTERM
    until(lambda: not is_alive(child), "the child has ended")


def test_results_on_disk_are_always_whole(tmp_path: Path) -> None:
    results = PartResults(tmp_path / "r.json")
    assert read_results(tmp_path / "r.json") == ({}, ["it did not come to its end"])
    results.record("a", [1])
    assert read_results(tmp_path / "r.json") == ({"a": [1]}, ["it did not come to its end"])
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.record("b", {"c": float("inf")})
    results.finish()
    assert read_results(tmp_path / "r.json") == ({"a": [1]}, [])


def test_parts_use_the_allocator_of_an_engine_or_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    part = fault("records_the_allocator")
    assert run(tmp_path, part)[part.name].figures == {"allocator": "expandable_segments:True"}
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert run(tmp_path, part)[part.name].figures == {"allocator": "expandable_segments:False"}
    assert choose_allocator("cuda") == "expandable_segments:False"


@pytest.mark.parametrize(
    ("probe", "expected"),
    [
        ("pass", "expandable_segments:True"),
        ("import os, sys; sys.exit('True' in os.environ['PYTORCH_ALLOC_CONF'])", "expandable_segments:False"),
        ("raise SystemExit(1)", "expandable_segments:True"),  # nothing helps, and the parts say why
    ],
)
def test_a_child_process_tries_whether_memory_can_be_mapped(
    probe: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr("benchmarks.gpu.run.runner.PROBE", probe)
    assert choose_allocator("cuda") == expected


def test_the_tables_parts_exist_and_their_needs_come_first() -> None:
    from importlib import import_module

    seen: set[str] = set()
    for part in PARTS:
        module, _, function = part.target.partition(":")
        assert callable(getattr(import_module(module), function))
        assert set(part.needs) <= seen, part
        assert 0 < part.expected_s < part.limit_s
        seen.add(part.name)
    assert len(seen) == len(PARTS)


def test_the_first_call_shows_what_is_right_and_both_fit_their_time() -> None:
    assert [part for call in CALLS for part in call] == list(PARTS)
    correct = {"store_kvcache", "attention", "odd_attention", "cuda_graphs", "experts", "sampling"}
    assert correct | {"tokens_bfloat16", "tokens_float32", "tokens_experts"} <= {part.name for part in CALLS[0]}
    for call in CALLS:  # with a minute to compile kernels
        assert sum(part.expected_s for part in call) + 60 < DEADLINE_S


def test_a_second_call_takes_what_the_first_has_left(tmp_path: Path) -> None:
    first, second = fault("passes"), replace(fault("passes"), name="second", needs=("passes",))
    assert run(tmp_path, second)["second"].status == "not run"
    (tmp_path / "second.json").unlink(missing_ok=True)
    assert passed_before(tmp_path) == frozenset()
    run(tmp_path, first)
    assert passed_before(tmp_path) == {"passes"}
    assert run(tmp_path, second)["second"].status == "passed"
    run(tmp_path, replace(fault("raises"), name="passes"))  # an earlier result of a part that runs again does not count
    assert passed_before(tmp_path) == {"second"}


def test_chosen_parts_bring_what_they_need() -> None:
    assert [part.name for part in with_needs(["decode_8b"], {"limits", "checkpoint_0.6b"})] == [
        "checkpoint_8b",
        "decode_8b",
    ]
    assert [part.name for part in with_needs(["checkpoint_8b"])] == ["checkpoint_8b"]
    assert [part.name for part in with_needs(["decode_8b"])] == ["limits", "checkpoint_8b", "decode_8b"]
    with pytest.raises(ValueError, match="'checkpoint_9b' is not a part; choose from limits"):
        with_needs(["checkpoint_9b"])
