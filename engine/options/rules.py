"""Rules: the check of one value each, shared by the options of an engine and the parameters of a request.

A rule returns the value as the object keeps it, and raises RuleError if the value breaks it. It does not know the
name of the value; ``apply_rules`` adds the name and the type of the error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from engine.errors import InvalidValueError, shown

__all__ = [
    "Rule",
    "RuleError",
    "apply_rules",
    "choice",
    "flag",
    "instance",
    "integer",
    "is_integer",
    "is_number",
    "items",
    "memory_size",
    "name_or_null",
    "number",
    "optional",
    "rules_of",
    "strings",
]

Rule = Callable[[Any], Any]

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class RuleError(Exception):
    """A value breaks a rule; ``fields`` are arguments of the InvalidValueError that reports it."""

    def __init__(self, problem: str, **fields: Any) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fields = fields


def rules_of(kind: type) -> dict[str, Rule]:
    """Return the rule of each attribute that has one in its annotation: ``Annotated[float, number(0, 2)]``."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def apply_rules(
    target: object,
    rules: Mapping[str, Rule],
    error: type[InvalidValueError],
    param: str | None = None,
    store: Callable[[Any, str, Any], None] = object.__setattr__,
) -> None:
    """Check the attributes of a frozen object, and store the values that the rules return.

    Args:
        target: the object.
        rules: attribute to rule.
        error: the type to raise.
        param: the parameter whose parts the attributes are; None if each attribute is a parameter.
        store: sets an attribute although the object is frozen.
    """
    for name, rule in rules.items():
        try:
            value = rule(getattr(target, name))
        except RuleError as broken:
            names = {"param": name} if param is None else {"param": param, "part": name}
            raise error(broken.problem, **names, **broken.fields) from None
        store(target, name, value)


def is_integer(value: object) -> bool:
    """Whether ``value`` is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any, low: float, high: float) -> bool:
    """Whether ``value`` is a number in [low, high]; NaN is in no interval."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def number(low: float, high: float, interval: str | None = None) -> Rule:
    """Return the rule for a finite number in [low, high], which messages write as ``interval``."""
    interval = interval or f"in [{low:g}, {high:g}]"

    def check(value: Any) -> Any:
        if not is_number(value, low, high):
            raise RuleError("is out of range", value=value, remedy=f"give a finite number {interval}")
        return value

    return check


def integer(low: int | None = None, high: int | None = None) -> Rule:
    """Return the rule for an integer of at least ``low`` and at most ``high``; None means unlimited."""
    limits = [f"at least {low}"] * (low is not None) + [f"at most {high}"] * (high is not None)
    remedy = f"give an integer of {' and '.join(limits)}" if limits else "give an integer"

    def check(value: Any) -> Any:
        if not is_integer(value) or (low is not None and value < low) or (high is not None and value > high):
            raise RuleError("is out of range", value=value, remedy=remedy)
        return value

    return check


def optional(rule: Rule) -> Rule:
    """Return the rule that also allows None."""
    return lambda value: None if value is None else rule(value)


def choice(*values: str) -> Rule:
    """Return the rule for one of several strings."""

    def check(value: Any) -> Any:
        if not isinstance(value, str) or value not in values:
            remedy = f"choose one of {', '.join(values)}" if len(values) > 1 else f"choose {values[0]}"
            raise RuleError("is unknown", value=value, remedy=remedy)
        return value

    return check


def instance(kind: type, problem: str) -> Rule:
    """Return the rule for an object of one type."""

    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            raise RuleError(problem, value=value)
        return value

    return check


def flag(value: Any) -> Any:
    """Check a bool."""
    if not isinstance(value, bool):
        raise RuleError("must be true or false", value=value)
    return value


def name_or_null(value: Any) -> Any:
    """Check a string that is not empty, or None."""
    if value is not None and (not isinstance(value, str) or not value):
        raise RuleError("must be a name, or null", value=value)
    return value


def items(value: Any, limit: int | None, noun: str) -> tuple[Any, ...]:
    """Return a list of at most ``limit`` items as a tuple."""
    if not isinstance(value, list | tuple):
        raise RuleError("must be a list", value=value)
    if limit is not None and len(value) > limit:
        raise RuleError(f"has {len(value)} {noun}", remedy=f"give at most {limit}")
    return tuple(value)


def strings(limit: int) -> Rule:
    """Return the rule for a list of at most ``limit`` strings that are not empty; None is an empty list."""

    def check(value: Any) -> Any:
        checked = items(() if value is None else value, limit, "strings")
        for string in checked:
            if not isinstance(string, str) or not string:
                raise RuleError(f"contains {shown(string)}", remedy="give strings that are not empty")
        return checked

    return check


def memory_size(value: Any) -> int:
    """Return bytes from an int or from text such as ``"512MiB"`` or ``"4 GiB"``.

    Raises:
        RuleError: if the text is not a size, or the size is not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or not isinstance(value, int | str) or isinstance(value, bool):
        raise RuleError("is not a memory size", value=value, remedy="give bytes or text such as '512MiB' or '4GiB'")
    size = float(match[1]) * unit
    if not 1 <= size < 2**63:
        raise RuleError("is not an amount of memory that a machine has", value=value, remedy="give, say, '512MiB'")
    return int(size)
