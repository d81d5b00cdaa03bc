"""The tools that `pagoda chat` offers to the model: those of the web page. They run here, in the client."""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Callable
from typing import Any

from deployments.cli.client import ServerClient, ServerError

__all__ = ["DEFINITIONS", "evaluate", "result_of"]

DECIMALS = 4
MAX_CHARACTERS = 500  # of an expression
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_PARAMETERS: dict[str, tuple[str, dict[str, Any]]] = {
    "calculator": ("Computes an expression with + - * / and brackets.", {"expression": {"type": "string"}}),
    "cluster_status": ("Reads the current figures of the cluster.", {}),
}

DEFINITIONS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }
    for name, (description, properties) in _PARAMETERS.items()
]


def result_of(client: ServerClient, name: str, arguments: str) -> str:
    """Run a call of the model and return its result as JSON; what is wrong with the call is a result too."""
    try:
        given = json.loads(arguments or "{}")
        if name == "calculator":
            return json.dumps({"result": evaluate(str(given["expression"]))})
        if name == "cluster_status":
            return json.dumps(_figures(client.get("/live").json()["replicas"]))
        return json.dumps({"error": f"there is no tool {name}"})
    except (ValueError, LookupError, TypeError, ArithmeticError, ServerError) as error:
        return json.dumps({"error": str(error) or type(error).__name__})


def evaluate(expression: str) -> float:
    """Return the value of a sum with + - * / and brackets, rounded.

    Raises:
        ValueError: it is anything else, or its result is not finite.
        ZeroDivisionError: it divides by zero.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has more than {MAX_CHARACTERS} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is not an expression with + - * / and brackets") from None
    if not math.isfinite(value):
        raise ValueError("the result is too large")
    rounded = round(value, DECIMALS)
    return int(rounded) if rounded == int(rounded) else rounded


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError("only numbers, + - * / and brackets are known")


def _figures(replicas: list[dict[str, Any]]) -> dict[str, int]:
    """Return the figures as the web page's tool does."""
    blocks = sum(replica["num_blocks"] for replica in replicas)
    used = sum(replica["blocks"]["used"] for replica in replicas)
    asked = sum(replica["query_tokens"] for replica in replicas)
    hits = sum(replica["hit_tokens"] for replica in replicas)
    return {
        "engines": len(replicas),
        "running": sum(replica["running"] for replica in replicas),
        "waiting": sum(replica["waiting"] + replica["swapped"] for replica in replicas),
        "kv_used_percent": round(100 * used / max(1, blocks)),
        "prefix_hit_percent": round(100 * hits / max(1, asked)),
    }
