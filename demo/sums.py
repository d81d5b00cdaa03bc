"""Random questions for the calculator, with the expression that the model has to send and its value."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass

from demo.tool_corpus import Calculator, Operation

DECIMALS = 4  # of the page's calculator
HELD_OUT_EVERY = 10  # every tenth pair of numbers is kept for the tests
_APPLY: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
# Expressions of three numbers.
_LONG: tuple[tuple[str, Callable[[float, float, float], float]], ...] = (
    ("{} + {} + {}", lambda a, b, c: a + b + c),
    ("{} + {} - {}", lambda a, b, c: a + b - c),
    ("{} * {} + {}", lambda a, b, c: a * b + c),
    ("{} + {} * {}", lambda a, b, c: a + b * c),
    ("{} * {} * {}", lambda a, b, c: a * b * c),
    ("({} + {}) * {}", lambda a, b, c: (a + b) * c),
    ("({} - {}) * {}", lambda a, b, c: (a - b) * c),
)


@dataclass(frozen=True)
class Sum:
    """A question, the expression that it means, and its value as JSON writes it."""

    question: str
    expression: str
    value: str


def is_held_out(a: str, b: str) -> bool:
    """Whether a pair of numbers is kept for the tests."""
    return sum(map(ord, f"{a} {b}")) % HELD_OUT_EVERY == 0


def number_text(value: float) -> str:
    """A result as the page's calculator writes it: rounded, without a needless fraction."""
    rounded = round(value, DECIMALS)
    return str(int(rounded)) if rounded == int(rounded) else str(rounded)


class SumMaker:
    """Draws sums; the same random numbers give the same sums."""

    def __init__(self, corpus: Calculator, rng: random.Random) -> None:
        self._corpus = corpus
        self._rng = rng

    def draw(self) -> Sum:
        """A sum to train on."""
        if self._rng.random() < 0.12:
            return self._long_sum()
        operation = self._rng.choice(self._corpus.operations)
        a, b = self._pair(operation)
        while is_held_out(a, b):
            a, b = self._pair(operation)
        if self._rng.random() < 0.25:
            return self._sum(self._rng.choice(operation.ask).format(a=a, b=b), operation, a, b)
        return self._sum(self._rng.choice(self._corpus.ask).format(self._written(operation, a, b)), operation, a, b)

    def draw_held_out(self, max_digits: int = 2) -> Sum:
        """A sum of two whole numbers for the tests: the numbers, or the words around them, are never trained on."""
        rng, operation = self._rng, self._rng.choice(self._corpus.operations)
        frame = rng.choice((*self._corpus.ask, *self._corpus.held_out))
        a, b = "0", "0"
        while not is_held_out(a, b) or b == "0":
            a, b = (str(rng.randrange(10 ** rng.randint(1, max_digits))) for _ in range(2))
        return self._sum(frame.format(self._written(operation, a, b)), operation, a, b)

    def _sum(self, question: str, operation: Operation, a: str, b: str) -> Sum:
        value = _APPLY[operation.sign](float(a), float(b))
        return Sum(question, f"{a} {operation.sign} {b}", number_text(value))

    def _written(self, operation: Operation, a: str, b: str) -> str:
        """The expression as people write it."""
        chance = self._rng.random()
        if chance < 0.5:
            return f"{a} {operation.sign} {b}"
        if chance < 0.65:
            return f"{a}{operation.sign}{b}"
        return f"{a} {self._rng.choice(operation.words)} {b}"

    def _long_sum(self) -> Sum:
        shape, value = self._rng.choice(_LONG)
        numbers = [self._number() for _ in range(3)]
        expression = shape.format(*numbers)
        written = expression if self._rng.random() < 0.7 else expression.replace(" ", "")
        return Sum(
            self._rng.choice(self._corpus.ask).format(written), expression, number_text(value(*map(float, numbers)))
        )

    def _pair(self, operation: Operation) -> tuple[str, str]:
        if operation.sign != "/":
            return self._number(), self._number()
        divisor = self._number()
        while float(divisor) == 0:
            divisor = self._number()
        if self._rng.random() < 0.5:
            return self._number(), divisor
        return number_text(float(divisor) * self._rng.randint(1, 99)), divisor

    def _number(self) -> str:
        rng = self._rng
        digits = rng.choice((1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 5))
        whole = str(rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits))
        return whole if rng.random() < 0.9 else f"{whole}.{rng.choice('123456789')}"
