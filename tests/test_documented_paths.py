"""Every file and module that the documentation names exists: Markdown, comments of YAML files, docstrings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.source_files import read_source

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks", "demo", "deployments", "docs", "engine", "k8s", "kernels", "tests")
TOP = "|".join(FOLDERS)
PATH = re.compile(rf"(?<![\w./-])((?:{TOP})/[\w./-]*\w/?)")  # from the root of the checkout
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]+))?\)")  # a relative link in Markdown, and its anchor
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
DOTTED = rf"((?:{TOP})(?:\.[a-z_]\w*)+)"
MODULES = (  # how a text names a module: as a command, in an import, as MODULE:ATTRIBUTE
    re.compile(rf" -m {DOTTED}"),
    re.compile(rf"\bfrom {DOTTED} import\b"),
    re.compile(rf"(?<![\w./-]){DOTTED}:\w"),
)
WRITTEN_LATER = "benchmarks/results/"  # commands name files that they write there


def markdown_files() -> list[Path]:
    """Return every Markdown file of the checkout."""
    return sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])


def dead(text: str) -> list[str]:
    """Return the paths and modules in a text that do not exist."""
    paths = {path for path in PATH.findall(text) if not path.startswith(WRITTEN_LATER)}
    missing = {path for path in paths if not (ROOT / path).exists() and not (ROOT / f"{path}.py").exists()}
    for module in {module for pattern in MODULES for module in pattern.findall(text)}:
        path = ROOT / module.replace(".", "/")
        if not path.with_suffix(".py").exists() and not path.is_dir():
            missing.add(module)
    return sorted(missing)


def test_what_does_not_exist_is_found() -> None:
    text = (
        "See engine/gone.py, engine/llm.py and `engine/gone`; run python -m benchmarks.gone or -m benchmarks.serve.\n"
    )
    text += "from engine.gone import LLM\nfrom engine.llm import LLM\nimport_path: deployments.gone:build_app"
    assert dead(text) == ["benchmarks.gone", "deployments.gone", "engine.gone", "engine/gone", "engine/gone.py"]


@pytest.mark.parametrize("path", markdown_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_markdown_names_what_exists(path: Path) -> None:
    text = path.read_text()
    assert not dead(text)
    for name, anchor in LINK.findall(text):
        target = path.parent / name if name else path
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a Markdown file."""
    titles = (re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(path.read_text()))
    return {title.replace(" ", "-") for title in titles}


def test_the_architecture_page_names_what_exists_in_a_file() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    named = re.findall(r"`(\w+)(?:\.(\w+))?` (?:in|of) `([\w/]+\.py)`", page)
    assert len(named) > 3
    for name, method, path in named:
        source = (ROOT / path).read_text()
        assert re.search(rf"^(class |def |async def |){name}\b", source, re.MULTILINE), (name, path)
        assert not method or f"def {method}(" in source, (name, method, path)


def test_yaml_files_and_build_files_name_what_exists() -> None:
    files = [ROOT / name for name in ("serve_config.yaml", "Makefile", "pyproject.toml", ".ci/run", "k8s/Dockerfile")]
    files += (ROOT / "k8s").rglob("*.yaml")
    assert not {path.name: missing for path in files if (missing := dead(path.read_text()))}


def test_docstrings_and_comments_name_what_exists() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    missing = {}
    for path in sorted(files):
        comments = re.findall(r"#.*", path.read_text())
        if paths := dead("\n".join([*read_source(path).docstrings, *comments])):
            missing[str(path.relative_to(ROOT))] = paths
    assert not missing
