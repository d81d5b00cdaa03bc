"""What tests read in the source files of the checkout: each is parsed once, and its syntax tree is not kept."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Source", "read_source"]

_WITH_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Source:
    """A file.

    Attributes:
        imported: the dotted names of the modules that it imports, those inside functions included.
        imported_at_once: those of its top level.
        docstrings: of the module, its classes and functions.
    """

    imported: tuple[str, ...]
    imported_at_once: tuple[str, ...]
    docstrings: tuple[str, ...]


@cache
def read_source(path: Path) -> Source:
    """Return what a file imports and says."""
    tree = ast.parse(path.read_text())
    nodes = [tree, *_statements(tree)]
    docstrings = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, _WITH_DOCSTRINGS)]
    return Source(tuple(_imported(nodes)), tuple(_imported(tree.body)), tuple(docstrings))


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements within a node, without the expressions, most of what a file consists of."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        children = getattr(node, field, ())
        for child in children if isinstance(children, list) else ():
            yield child
            yield from _statements(child)


def _imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
