"""divided: a count that tensor-parallel ranks share."""

from __future__ import annotations

from engine.errors import ConfigError

__all__ = ["divided"]


def divided(count: int, size: int, name: str) -> int:
    """Return one rank's share of ``count`` of what ``name`` says; raise ConfigError unless it is whole."""
    if count % size:
        problem = f"does not divide the model's {count} {name}"
        raise ConfigError(problem, param="tensor_parallel_size", value=size, remedy="choose another size")
    return count // size
