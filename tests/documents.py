"""The documentation for users, README.md and docs/: its fenced blocks of code, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [README, *PAGES]

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_SUBSTITUTION = re.compile(r"\$\([^)]*\)")
_END_OF_COMMAND = {"&&", "||", ";"}


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced block of code."""

    document: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def code_blocks(document: Path, *languages: str) -> list[CodeBlock]:
    """Return the blocks of a document in order, those of ``languages`` if any are given."""
    text = document.read_text()
    blocks = [
        CodeBlock(document, text[: fence.start()].count("\n") + 1, fence[2], fence[3])
        for fence in _FENCE.finditer(text)
    ]
    return [block for block in blocks if not languages or block.language in languages]


def uses_server(block: CodeBlock) -> bool:
    """Whether a Python block is a client of a running server."""
    return "client" in block.text


def shell_lines(block: CodeBlock) -> Iterator[str]:
    """Yield the command lines of a block, continued lines joined."""
    line = ""
    for part in block.text.replace("\\\n", " ").splitlines():
        line = f"{line}\n{part}" if line else part
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation that is still open
            continue
        if words:
            yield line
        line = ""


def commands(line: str) -> list[list[str]]:
    """Return the words of each command of a line, without the variables that are set before it."""
    words = shlex.split(_SUBSTITUTION.sub("SUBSTITUTED", line), comments=True)
    commands: list[list[str]] = [[]]
    for word in words:
        if word in _END_OF_COMMAND:
            commands.append([])
        elif commands[-1] or not re.match(r"[A-Z_]+=", word):
            commands[-1].append(word)
    return [command for command in commands if command]


def table_below(document: Path, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without the table's own heading."""
    _, _, text = document.read_text().partition(f"\n## {heading}\n")
    lines = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    assert lines, f"{document} has no table below '{heading}'"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
