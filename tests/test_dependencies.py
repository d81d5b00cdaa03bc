"""pyproject.toml declares every package that the code imports, in the extra of the folder that imports it."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest

from tests.source_files import read_source

ROOT = Path(__file__).resolve().parents[1]
OURS = {"benchmarks", "demo", "deployments", "engine", "k8s", "kernels", "tests"}
EXTRAS = {  # the extras that each folder may rely on, besides the dependencies
    "deployments": ("tracing", "data"),
    "engine": (),
    "kernels": ("gpu", "flash-attn"),
    "k8s": (),
    "benchmarks": ("test", "bench", "lm-eval"),
    "demo": ("test",),
    "tests": ("test", "mutation", "clients"),
}
# Distributions of modules that need not be installed, where the names differ.
DISTRIBUTIONS = {
    "agents": "openai-agents",
    "dynamo": "ai-dynamo-runtime",
    "llama_index": "llama-index-llms-openai-like",
}
# Engines that benchmarks/peers compares with. Each lives in a virtual environment of its own, because their pinned
# dependencies exclude each other, and is imported inside functions of benchmarks/peers only.
PEERS = {"llama_cpp", "openvino", "openvino_genai", "vllm"}
NOT_ON_PYPI = {"flash_attn_interface"}  # an extra that names its package would install what anybody registers there


def normalized(name: str) -> str:
    """Return a distribution's name as PEP 503 normalizes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required_by(*extras: str) -> set[str]:
    """Return the distributions that pyproject.toml requires, with those of some extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return {normalized(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines}


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the dotted names of all modules of other projects that a file imports, those inside functions included."""
    for name in read_source(path).imported:
        top = name.partition(".")[0]
        if top not in OURS and top not in sys.stdlib_module_names:
            yield name


def in_requirements_of(folder: Path) -> set[str]:
    """Return the distributions of a folder's own requirements.txt, for programs that run in another environment."""
    path = folder / "requirements.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return {normalized(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines if line and line[0] != "#"}


@cache
def installed() -> dict[str, list[str]]:
    """Return the distributions that provide each top-level name."""
    return {name: list(providers) for name, providers in packages_distributions().items()}


@cache
def providers(module: str) -> set[str]:
    """Return the distributions that a module comes from; one that is not installed is taken to be named like it."""
    top = module.partition(".")[0]
    names = set(installed().get(top, [DISTRIBUTIONS.get(top, top)]))
    if len(names) > 1:  # a namespace package: the distributions that have this part of it
        path = module.replace(".", "/")
        names = {name for name in names if any(str(item).startswith(path) for item in distribution(name).files or ())}
    return {normalized(name) for name in names}


@pytest.mark.parametrize("folder", sorted(OURS))
def test_every_imported_package_is_declared(folder: str) -> None:
    allowed = required_by(*EXTRAS[folder])
    undeclared = {
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for module in imported_modules(path)
        if not providers(module) & (allowed | in_requirements_of(path.parent))
        and module.partition(".")[0] not in PEERS | NOT_ON_PYPI
    }
    assert not undeclared, "declare these in pyproject.toml"


def test_peers_are_imported_lazily_and_by_their_runners_only() -> None:
    for path in sorted(path for folder in OURS for path in (ROOT / folder).rglob("*.py")):
        is_runner = path.parent == ROOT / "benchmarks" / "peers"
        modules = {module.partition(".")[0] for module in imported_modules(path)}
        assert is_runner or not modules & PEERS, path
        eager = read_source(path).imported_at_once
        assert not {name.partition(".")[0] for name in eager} & PEERS, path


def test_only_an_extra_of_its_own_needs_a_compiler_for_cuda() -> None:
    # flash-attn has no wheel on PyPI: `pip install -e '.[gpu]'` must work without nvcc.
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert {extra for extra in extras if "flash-attn" in required_by(extra)} == {"flash-attn"}
    assert not any("flash-attn-3" in required_by(extra) for extra in extras)
    assert {"torch", "triton"} <= required_by("gpu")
