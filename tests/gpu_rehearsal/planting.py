"""Puts a fault into a function of the product: its source with one more line, under its own file name."""

from __future__ import annotations
import __future__

import ast
import inspect
import textwrap
from importlib import import_module
from typing import Any

import pytest

from tests.gpu_rehearsal.code_lines import ROOT

__all__ = ["plant"]


def plant(monkeypatch: pytest.MonkeyPatch, target: str, after: str, fault: str) -> str:
    """Insert a statement until the test ends.

    Args:
        target: "module:function" or "module:Class.method"; it must not use ``super()``.
        after: text of the only line after which the statement stands, with the same indentation.
        fault: the statement.

    Returns:
        The planted line, as "file:line in function".
    """
    module_name, _, path = target.partition(":")
    module: Any = import_module(module_name)
    *owners, name = path.split(".")
    owner: Any = module
    for attribute in owners:
        owner = getattr(owner, attribute)
    function = inspect.unwrap(getattr(owner, name))
    lines, first = inspect.getsourcelines(function)
    (index,) = [i for i, line in enumerate(lines) if after in line]
    indent = lines[index][: len(lines[index]) - len(lines[index].lstrip())]
    source = textwrap.dedent("".join([*lines[: index + 1], f"{indent}{fault}\n", *lines[index + 1 :]]))
    tree = ast.increment_lineno(ast.parse(source), first - 1)
    file = inspect.getsourcefile(function)
    assert file is not None
    namespace: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, file, "exec", flags=flags, dont_inherit=True), vars(module), namespace)
    monkeypatch.setattr(owner, name, namespace[name])
    return f"{file.removeprefix(f'{ROOT}/')}:{first + index + 1} in {name}"
