"""Draws mutants of a package at random, and counts those that its tests notice. ``--help`` shows the options.

This is a script, not a module of the package ``tests``: mutmut imports the tests from its own copy of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import time
import tomllib
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
TEST_LIMIT_S = 60  # unless the package says another one
MAX_TRIES = 5  # if a test fails for another reason than the mutant
CURRENT = ROOT / "build" / "mutation" / f"test-{os.getpid()}"  # the test that runs
RESULTS = ROOT / "benchmarks" / "results" / "mutation.json"
PACKAGES: dict[str, Any] = tomllib.loads((Path(__file__).parent / "packages.toml").read_text())
LINKED = ("deployments", "engine", "kernels", "demo", "k8s", "benchmarks", "serve_config.yaml")
CONFIG = """
[tool.mutmut]
source_paths = {sources}
do_not_mutate = {left_out}
do_not_mutate_patterns = ['\\blog(ger)?\\.(debug|info|warning|error|exception)\\(']  # messages may change
also_copy = {linked}
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = ["-o", "addopts=", "-p", "no:cacheprovider", "-m", "not long"]
timeout_constant = 20.0
timeout_multiplier = 4.0
track_dependencies = false
"""


def prepare(name: str, package: dict[str, Any]) -> None:
    """Make the folder in which mutmut works, with links to the code, and go there."""
    folder = ROOT / "build" / "mutation" / name
    folder.mkdir(parents=True, exist_ok=True)
    for linked in ("tests", *LINKED):
        (folder / linked).unlink(missing_ok=True)
        (folder / linked).symlink_to(ROOT / linked)
    config = CONFIG.format(
        sources=package["sources"], left_out=package.get("left_out", []), linked=list(LINKED), tests=package["tests"]
    )
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + config)
    os.chdir(folder)


def generate() -> list[str]:
    """Write all mutants; return their names."""
    from mutmut import __main__ as mutmut

    Path("mutants").mkdir(exist_ok=True)
    mutmut.copy_src_dir()
    mutmut.copy_also_copy_files()
    mutmut.setup_source_paths()
    mutmut.create_mutants(1)
    return sorted(exit_codes())


def exit_codes() -> dict[str, int | None]:
    """Return what mutmut has recorded of each mutant: pytest's exit code, or None."""
    statuses: dict[str, int | None] = {}
    for file in Path("mutants").rglob("*.meta"):
        statuses.update(json.loads(file.read_text())["exit_code_by_key"])
    return statuses


def run(names: list[str], slow_tests: list[str], limit_s: float) -> dict[str, str]:
    """Run the tests of each mutant, and for a survivor all tests; return mutmut's word for the outcome.

    Mutants that an earlier run has killed, or an earlier report calls equivalent, are not run again, unless their code
    has changed.
    """
    from mutmut import __main__ as mutmut
    from mutmut.runners.harness import PytestRunner

    os.environ.update(OMP_NUM_THREADS="1", HYPOTHESIS_PROFILE="mutation")
    for _ in range(2):  # the first run forgets all results if the package's tests have changed
        codes = exit_codes()
        if new := [name for name in names if codes[name] is None]:
            run_quick_tests(new)
    codes = exit_codes()
    assert None not in [codes[name] for name in names], "mutmut has not run all of them"
    outcomes = {name: mutmut.status_by_exit_code[codes[name]] for name in names}
    tests = [*slow_tests, *mutmut.config().pytest_add_cli_args_test_selection]
    with contextlib.chdir("mutants"):
        PytestRunner().execute_pytest(["--collect-only", "-qqq", *tests])  # imports what the children need
    for name in names:
        if outcomes[name] in ("survived", "no tests") and not reason_of(describe(name)):
            is_killed = fails(name, tests, limit_s)
            outcomes[name] = "killed" if is_killed else "survived"
            print(f"{name}: {outcomes[name]} by all tests", flush=True)
            if is_killed:
                record_kill(name)
    return outcomes


def run_quick_tests(names: list[str]) -> None:
    """Let mutmut run its tests, in a process of its own: it leaves threads that a forked process would lack."""
    from mutmut import __main__ as mutmut

    if (child := os.fork()) == 0:
        mutmut._run(names, 1)
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit("mutmut has failed; its output says why")


def record_kill(name: str) -> None:
    """Put the outcome of ``run_in_child`` beside mutmut's own."""
    from mutmut.mutation.diff_apply import find_mutant

    data = find_mutant(name)
    data.exit_code_by_key[name] = 1
    data.save()


def fails(name: str, tests: list[str], limit_s: float) -> bool:
    """Whether a test fails on a mutant, and fails again on it but passes without it: a busy machine fails tests too."""
    folder = name.split(".")[1]
    tests = sorted(tests, key=lambda test: f"/{folder}/" not in test)  # those beside the code are the likely ones
    left_out: list[str] = []  # tests that fail without the mutant, or do not fail again
    for _ in range(MAX_TRIES):
        failed = failure_of(name, [*tests, *(f"--deselect={item}" for item in left_out)], limit_s)
        if not failed:
            return failed is not None  # empty: the tests cannot even be collected
        if failure_of(name, [failed], limit_s) and not failure_of("", [failed], limit_s):
            return True
        left_out.append(failed)
    return False


def failure_of(name: str, tests: list[str], limit_s: float) -> str | None:
    """Run these tests on a mutant, or on none, in a new process; return the first that fails, None if none does.

    All tests have to run again, because mutmut attributes a function that a shared fixture calls to one test only. A
    test that outlives the limit has failed. The process is killed then: an exception that a signal raises may be lost
    in a callback of the event loop, and fixtures may wait forever too.
    """
    CURRENT.write_text("")
    if (child := os.fork()) == 0:
        run_tests(name, tests)
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.time() - CURRENT.stat().st_mtime > limit_s:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return CURRENT.read_text()
        time.sleep(0.02)
    return None if os.waitstatus_to_exitcode(ended[1]) in (0, 5) else CURRENT.read_text()  # 5: no test is left


def run_tests(name: str, tests: list[str]) -> NoReturn:
    """Run these tests on a mutant, or on none, and end the process."""
    from mutmut.mutation.trampoline import set_mutant_under_test
    from mutmut.runners.harness import PytestRunner

    os.setsid()
    set_mutant_under_test(name)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    os.chdir("mutants")
    os._exit(PytestRunner().execute_pytest(["-q", *tests], plugins=[FirstFailure()]))


class FirstFailure:
    """A plugin of pytest that writes down which test runs, and ends the process if it fails."""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        CURRENT.write_text(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os._exit(1)


def describe(name: str) -> dict[str, Any]:
    """Return the file, the line, and the changed lines of a mutant."""
    from mutmut.mutation.diff_apply import find_mutant, get_diff_for_mutant

    path = find_mutant(name).path
    diff = get_diff_for_mutant(name, path=path).splitlines()[3:]
    before = [line[1:].strip() for line in diff if line.startswith("-")]
    after = [line[1:].strip() for line in diff if line.startswith("+")]
    source = [line.strip() for line in Path(path).read_text().splitlines()]
    function = name.rpartition(".")[2].partition("__mutmut_")[0].replace("ǁ", "_").rpartition("_")[2]
    start = next((i for i, line in enumerate(source) if f"def {function}" in line or f"{function}(" in line), 0)
    line = next((i + 1 for i in range(start, len(source)) if before and source[i] == before[0]), 0)
    return {"file": f"{path}:{line}", "before": " ".join(before), "after": " ".join(after)}


def reason_of(mutant: dict[str, Any]) -> str:
    """Return why a mutant is equivalent, as an earlier report says; empty if none does."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"packages": {}}
    for report in kept["packages"].values():
        for item in report["equivalent"]:
            if item["file"].partition(":")[0] == mutant["file"].partition(":")[0] and all(
                item[key] == mutant[key] for key in ("before", "after")
            ):
                return str(item["reason"])
    return ""


def report(name: str, seed: int, num_mutants: int, outcomes: dict[str, str]) -> None:
    """Put the counts of a package into the results, survivors of equal meaning apart."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"packages": {}}
    kept["tool"] = f"mutmut {version('mutmut')}"
    counts = Counter(outcomes.values())
    survived, equivalent = [], []
    for mutant in sorted(mutant for mutant, outcome in outcomes.items() if outcome in ("survived", "no tests")):
        described = describe(mutant)
        if reason := reason_of(described):
            equivalent.append({**described, "reason": reason})
        else:
            survived.append({"name": mutant, **described})
    killed = len(outcomes) - len(survived) - len(equivalent)
    kept["packages"][name] = {
        "seed": seed,
        "mutants": num_mutants,
        "sampled": len(outcomes),
        "killed": killed,
        "killed_by_time_out": counts["timeout"],
        "killed_of_non_equivalent": round(killed / (killed + len(survived)), 3),
        "survived": survived,
        "equivalent": equivalent,
    }
    RESULTS.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")
    print(
        f"{name}: {killed} of {len(outcomes)} killed, {len(survived)} survived, {len(equivalent)} equivalent; {counts}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", choices=sorted(PACKAGES))
    parser.add_argument("--sample", type=int, default=60, help="how many mutants are drawn")
    parser.add_argument("--seed", type=int, default=17)
    options = parser.parse_args()
    package = PACKAGES[options.package]
    prepare(options.package, package)
    names = generate()
    drawn = sorted(random.Random(options.seed).sample(names, min(options.sample, len(names))))
    outcomes = run(drawn, package["slow_tests"], package.get("test_limit_s", TEST_LIMIT_S))
    report(options.package, options.seed, len(names), outcomes)


if __name__ == "__main__":
    main()
