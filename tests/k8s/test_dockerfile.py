"""k8s/Dockerfile: its rules, that what it copies and starts is there, and that what it copies is enough.

That it builds is not checked: that takes a Docker daemon and the network.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.k8s.manifests import GPU, K8S, ROOT, pods, tool
from tests.waiting import HANG_S

DOCKERFILE = K8S / "Dockerfile"
# Instructions on one line each, without comments.
LINES = re.sub(r"\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)).splitlines()
INSTRUCTIONS = [line.partition(" ")[::2] for line in LINES if line.strip()]


def _arguments(instruction: str) -> list[str]:
    return [rest for name, rest in INSTRUCTIONS if name == instruction]


def _copied() -> list[tuple[str, str]]:
    """Return what is copied out of the checkout, and to where."""
    pairs = []
    for rest in _arguments("COPY"):
        if not rest.startswith("--from="):
            *sources, target = rest.split()
            pairs += [(source, target) for source in sources]
    return pairs


def test_hadolint_finds_no_mistake() -> None:
    answer = subprocess.run([tool("hadolint"), DOCKERFILE], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (answer.returncode, answer.stdout) == (0, "")


def test_hadolint_finds_a_planted_mistake(tmp_path: Path) -> None:
    worse = tmp_path / "Dockerfile"
    worse.write_text(DOCKERFILE.read_text().replace("python:3.12.12-slim-bookworm", "python:latest"))
    answer = subprocess.run([tool("hadolint"), worse], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert "DL3007" in answer.stdout


def test_the_base_is_pinned_slim_and_a_python_of_ours() -> None:
    stages = [rest.split() for rest in _arguments("FROM")]
    names = {stage[2] for stage in stages}
    (base,) = {stage[0] for stage in stages} - names
    version = re.fullmatch(r"python:(3\.\d+)\.\d+-slim-\w+", base)
    assert version is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert version[1] in ("3.11", "3.12")
    assert project["requires-python"] == ">=3.11,<3.13"


def test_both_images_run_as_a_user_that_kubernetes_can_check() -> None:
    stages: dict[str, list[str]] = {}
    for name, rest in INSTRUCTIONS:
        if name == "FROM":
            stages[rest.split()[-1]] = []
        elif name == "USER":
            list(stages.values())[-1].append(rest)
    assert stages["cpu"] == stages["gpu"] == ["10001:10001"]
    for pod in pods(GPU):
        if pod["metadata"].get("labels", {}).get("app.kubernetes.io/component") == "ray":
            security = pod["spec"]["securityContext"]
            assert f"{security['runAsUser']}:{security['runAsGroup']}" == "10001:10001"


def test_images_contain_no_secrets_and_no_downloads() -> None:
    assert not _arguments("ADD")
    assert not [rest for rest in _arguments("RUN") if re.search(r"\b(sudo|curl|wget)\b", rest)]
    for rest in [*_arguments("ARG"), *_arguments("ENV")]:
        assert not re.search(r"(TOKEN|SECRET|PASSWORD|KEY)", rest, re.IGNORECASE)
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"  # everything is ignored unless it is named


def test_copied_files_exist_and_are_not_ignored() -> None:
    allowed = {line[1:].rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    for source, _ in _copied():
        assert (ROOT / source).exists(), source
        assert source in allowed, source
    assert allowed == {source for source, _ in _copied()} | {"demo"}  # and nothing else; demo holds demo/model


def _printed_requirements() -> list[str]:
    """Return what the programs that read pyproject.toml print: the requirements of both images, then of the GPU's."""
    printed = []
    for rest in _arguments("RUN"):
        programs = [word for word in shlex.split(rest) if "tomllib" in word]
        for program in programs:
            command = [sys.executable, "-c", program]
            printed.append(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    return printed


def test_the_dependencies_are_those_of_the_project() -> None:
    common, gpu = (text.splitlines() for text in _printed_requirements())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dependencies, extras = project["dependencies"], project["optional-dependencies"]
    assert common == [*dependencies, *extras["tracing"]]
    assert gpu == extras["gpu"]
    assert any(item.startswith("torch==") for item in dependencies)  # the CPU image installs it from another index


def test_the_gpu_image_compiles_nothing() -> None:
    """PyPI has flash-attn only as source, so the image gets the wheel that FLASH_ATTN names, or none."""
    requirements = "".join(_printed_requirements())
    assert "torch==" in requirements
    assert "triton" in requirements
    assert "flash" not in requirements
    (install,) = [rest for rest in _arguments("RUN") if "FLASH_ATTN" in rest]
    assert "--only-binary=:all: --requirement requirements.txt ${FLASH_ATTN:+" in install
    assert _flash_attn_arguments(install, "") == []
    assert _flash_attn_arguments(install, "https://example.com/a b.whl") == ["https://example.com/a b.whl"]


def _flash_attn_arguments(install: str, value: str) -> list[str]:
    """Return the arguments after the requirements' file that bash passes to pip if FLASH_ATTN has a value."""
    last = install[install.index("requirements.txt ${") :].removeprefix("requirements.txt ")
    environment = os.environ | {"FLASH_ATTN": value}
    script = f'for argument in {last}; do echo "$argument"; done'
    answer = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    return answer.stdout.splitlines()


def test_the_gpu_image_names_the_cuda_version_of_its_torch() -> None:
    (variables,) = [rest for rest in _arguments("ENV") if "NVIDIA_VISIBLE_DEVICES" in rest]
    assert 'NVIDIA_REQUIRE_CUDA="cuda>=13.0"' in variables
    for document in (K8S / "README.md", ROOT / "README.md", ROOT / "docs/operations.md", DOCKERFILE):
        assert re.search(r"driver\s+580", document.read_text()), document


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Return a directory with the files that the stage `source` copies, and no others."""
    for source, target in _copied():
        if source == "pyproject.toml":
            continue  # another stage's
        path = tmp_path / (source if target == "./" else target)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, path, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / source, path)
    return tmp_path


@pytest.mark.long
def test_the_copied_files_suffice(image: Path) -> None:
    (command,) = _arguments("CMD")
    python, _, entry, config = json.loads(command)
    assert python == "python"
    program = (
        f"import deployments.app, deployments.drain, {entry}, pathlib, deployments.launcher.preflight as preflight\n"
        f"assert deployments.__file__.startswith({str(image)!r})\n"
        f"print(preflight.check_config(pathlib.Path({config!r})).model)"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(image), "HOME": str(image), "HF_HUB_OFFLINE": "1"}
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=image,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (answer.returncode, answer.stdout) == (0, "pagoda-demo\n"), answer.stderr[-2000:]
    assert os.access(image / "deployments/proxy/haproxy.sh", os.X_OK)
