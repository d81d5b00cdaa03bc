"""README.md and docs/: what can run without a server runs here; the other commands are checked, each for a reason.

tests/e2e/test_documented_requests.py sends the requests to a running server.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tomllib
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.option_names import option_names

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own modules warn while they are imported
    from ray.scripts.scripts import cli as ray_program
    from ray.serve.scripts import cli as serve_program

from typer.main import get_command

from deployments.batch.__main__ import job_parser
from deployments.cli.main import app as pagoda_app
from deployments.config import AppConfig
from deployments.launcher.preflight import check_config
from deployments.observability.ingress_metrics import INGRESS_METRICS
from engine.errors import ConfigError
from engine.observability.metrics import METRICS
from tests.documents import DOCUMENTS, PAGES, README, ROOT, CodeBlock, code_blocks, commands, shell_lines, uses_server

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINES = [(f"{block}", line) for page in DOCUMENTS for block in code_blocks(page, "bash") for line in shell_lines(block)]
LANGUAGES = {"python", "bash", "yaml", "json", "text", "mermaid"}


# --- README -----------------------------------------------------------------------------------------------------------


def test_the_readme_is_short_and_opens_every_page() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 900
    links = set(re.findall(r"\]\(([^)#]+)", text))
    assert {str(page.relative_to(ROOT)) for page in PAGES} <= links
    assert {"k8s/README.md", "k8s/monitoring/README.md", "benchmarks/README.md", "demo/README.md"} <= links


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_lines_are_at_most_120_characters_long(page: Any) -> None:
    lines = page.read_text().splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]


def test_every_block_has_a_language_that_is_checked() -> None:
    for page in DOCUMENTS:
        for block in code_blocks(page):
            assert block.language in LANGUAGES, block


# --- Python and YAML --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_python_blocks_run_and_print_what_the_page_says(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run in order, in one namespace, from the checkout."""
    monkeypatch.chdir(ROOT)
    namespace: dict[str, Any] = {}
    printed = ""
    for block in code_blocks(page, "python", "text"):
        if block.language == "text":
            assert not printed or block.text == printed, block
            printed = ""
        elif not uses_server(block):
            output = io.StringIO()
            with redirect_stdout(output):
                exec(compile(block.text, str(block), "exec"), namespace)
            printed = output.getvalue()


@pytest.mark.parametrize(
    "block", [block for page in DOCUMENTS for block in code_blocks(page, "yaml")], ids=lambda block: str(block)
)
def test_yaml_blocks_are_valid(block: CodeBlock, tmp_path: Path) -> None:
    """They are arguments of the application, or a configuration of Prometheus."""
    content = yaml.safe_load(block.text)
    if "scrape_configs" not in content:
        AppConfig.parse(content)
    elif shutil.which("promtool") is None:
        pytest.skip("needs promtool, of Debian's package prometheus")
    else:
        (tmp_path / "prometheus.yml").write_text(block.text)
        subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], check=True)


# --- commands ---------------------------------------------------------------------------------------------------------


def _check_make(words: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")  # lines that go on are one
    targets = re.findall(r"^\.PHONY: (.*)", makefile, re.MULTILINE)[0].split()
    assert set(words) <= set(targets), words
    subprocess.run(["make", "--dry-run", *words], cwd=ROOT, check=True, capture_output=True)


def _check_pip(words: Sequence[str]) -> None:
    assert words[0] in ("install", "wheel"), words
    for word in words:
        if word.startswith(".["):
            assert set(word[2:-1].split(",")) <= PROJECT["optional-dependencies"].keys(), word
        elif "==" in word:
            assert word in PROJECT["dependencies"], word


def _check_venv(words: Sequence[str]) -> None:
    assert list(words) == ["-m", "venv", ".venv"]
    assert "\nVENV   := .venv\n" in (ROOT / "Makefile").read_text()


def _check_click(group: Any, words: Sequence[str]) -> None:
    """Check that a command of a program that click parses exists and has these options."""
    command = group.commands[words[0]]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words[1:] if word.startswith("-")} <= known, words


def _check_serve(words: Sequence[str]) -> None:
    _check_click(serve_program, words)
    for file in words[1:]:
        check_config(ROOT / file)


def _check_ray(words: Sequence[str]) -> None:
    _check_click(ray_program, words)


def _check_pagoda(words: Sequence[str]) -> None:
    """Check that the command exists and has these options."""
    command, rest = get_command(pagoda_app), list(words)
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in rest if word.startswith("--")} <= known, words


def _check_module(words: Sequence[str]) -> None:
    """Check that the module is the one whose options these are."""
    assert list(words[:2]) == ["-m", "deployments.batch"]
    known = {option for action in job_parser()._actions for option in action.option_strings}
    assert {word for word in words[2:] if word.startswith("--")} <= known, words


def _check_variable(words: Sequence[str]) -> None:
    assert list(words) == ["RAY_AUTH_MODE=token"]


def _check_activate(words: Sequence[str]) -> None:
    assert list(words) == [".venv/bin/activate"]


# What does not run here, with the reason, and what is checked instead.
NOT_RUN: dict[str, tuple[str, Callable[[Sequence[str]], None]]] = {
    "curl": ("tests/e2e/test_documented_requests.py sends them to a server", lambda words: None),
    "make": ("tests/e2e run what `make serve` and `make status` run; `make test` would run this test", _check_make),
    "pip": ("installs gigabytes, and flash-attn needs nvcc", _check_pip),
    ".venv/bin/pip": ("installs gigabytes", _check_pip),
    "python3": ("makes an environment in the checkout", _check_venv),
    ".": ("the tests run in their environment", _check_activate),
    "export": ("only matters to the commands after it", _check_variable),
    "serve": ("tests/e2e run `serve run` through the launcher; the others need a cluster", _check_serve),
    "python": ("tests/deployments/batch/test_data_job.py runs it", _check_module),
    "pagoda": ("tests/deployments/cli runs it in a terminal", _check_pagoda),
    "ray": ("starts or stops a cluster on this machine", _check_ray),
}


@pytest.mark.parametrize(("where", "line"), LINES, ids=[where for where, _ in LINES])
def test_commands_are_as_described(where: str, line: str) -> None:
    for program, *words in commands(line):
        assert program in NOT_RUN, f"{where}: run '{program}' in a test, or check it and add the reason to NOT_RUN"
        NOT_RUN[program][1](words)


def test_all_reasons_are_needed() -> None:
    assert {command[0] for _, line in LINES for command in commands(line)} == NOT_RUN.keys()


@pytest.mark.parametrize(
    "line",
    [
        "make srve",
        "pip install -e '.[gpus]'",
        "pip install torch==1.0",
        "serve run none.yaml",
        "serve rum serve_config.yaml",
        "ray start --heads",
        "pagoda serve --prnt-config",
        "pagoda config chekc x.yaml",
        "python -m deployments.batch x.jsonl --outs x",
        "A=$(b c) make tests",
        "docker run x",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises((AssertionError, KeyError, ConfigError)):
        test_commands_are_as_described("here", line)


@pytest.mark.parametrize("answers", [True, False])
def test_make_status_sends_the_token_and_names_the_remedy(tmp_path: Path, answers: bool) -> None:
    serve = tmp_path / "serve"
    serve.write_text(f'#!/bin/sh\necho "$RAY_AUTH_MODE $1"; exit {0 if answers else 1}\n')
    serve.chmod(0o755)
    command = ["make", "--no-print-directory", "status", f"BIN={tmp_path}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout == "token status\n"
    assert (result.returncode == 0) == answers
    assert ("start one with make serve" in result.stderr) == (not answers)


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_options_metrics_and_targets_in_the_text_exist(page: Any) -> None:
    text = page.read_text()
    for section, key in re.findall(
        r"`(replicas|engine|limits|router|autoscaling|logging|tracing)\.(\w+)(?=[`:])", text
    ):
        assert key in option_names(section), f"{section}.{key}"
    metrics = {metric.name for metric in (*METRICS, *INGRESS_METRICS)}
    for name in re.findall(r"`pagoda_([a-z_]+)`", text):
        assert {name, name.removesuffix("_total")} & metrics, name
    for target in re.findall(r"`make ([a-z-]+)`", text):
        _check_make([target])
