"""require_plausible: refuses a config.json whose values no model has, before anything computes or allocates with them.

Transformers checks the types of most fields, and the headers of the weights check sizes. Neither is reached with a
billion layers, or stops a NaN that makes every logit NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.errors import ModelLoadError, shown

__all__ = ["require_plausible"]

_LARGEST = {  # several times those of the largest models
    "num_hidden_layers": 512,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 8192,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**30,
    "num_labels": 2**24,
}
_FLAGS = ("attention_bias", "mlp_bias", "tie_word_embeddings")
_DTYPES = ("bfloat16", "float16", "float32", "float64", "auto")
_ROPE = ("rope_parameters", "rope_scaling")
_LARGEST_ROPE = 1e30
_POSITIVE = ("rope_theta", "factor")


def require_plausible(raw: dict[str, Any], path: object) -> None:
    """Check the fields of a config.json, and of the ``text_config`` in it.

    Raises:
        ModelLoadError: with the field, its value, and what it should be.
    """
    text = raw.get("text_config")
    for fields in (raw, text if isinstance(text, dict) else {}):
        for name, value, expected in _problems(fields):
            raise ModelLoadError(
                f"config.json of '{path}' could not be read: {name}={shown(value)} is not {expected}; correct it, or "
                "download it again"
            )


def _problems(raw: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield each wrong field with its value and what it should be. A field that is absent or null is right."""
    for name, largest in _LARGEST.items():
        value = raw.get(name, 1)  # some families have a list, a number for each layer
        if isinstance(value, bool | str | float) or (isinstance(value, int) and not 1 <= value <= largest):
            yield name, value, f"an integer from 1 to {largest}"
    yield from _wrong_heads(raw)
    for name in _FLAGS:
        if not isinstance(raw.get(name), bool | None):
            yield name, raw[name], "true or false"
    for name in ("dtype", "torch_dtype"):
        dtype = raw.get(name)
        if isinstance(dtype, str) and dtype.removeprefix("torch.") not in _DTYPES:
            yield name, dtype, f"one of {', '.join(_DTYPES)}"
    names = raw.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        yield "architectures", names, "a list of names"
    window = raw.get("sliding_window")
    if isinstance(window, int) and not 0 <= window < 2**31:
        yield "sliding_window", window, "a number of tokens"
    eps = raw.get("rms_norm_eps", 1e-6)
    if isinstance(eps, int | float) and not 0 <= eps < 1:  # also if it is NaN
        yield "rms_norm_eps", eps, "a small number"
    yield from _wrong_numbers("rope_theta", raw.get("rope_theta"))
    for name in _ROPE:
        yield from _wrong_numbers(name, raw.get(name))


def _wrong_heads(raw: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    heads, kv_heads, head_dim = (raw.get(name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        yield "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}"
    if isinstance(head_dim, int) and head_dim % 2:
        yield "head_dim", head_dim, "even"


def _wrong_numbers(name: str, value: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield the numbers in ``value``, at any depth, that are not finite or should be positive and are not."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _wrong_numbers(f"{name}.{key}", inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _wrong_numbers(f"{name}[{index}]", inner)
    elif isinstance(value, int | float):
        must_be_positive = name.rpartition(".")[2] in _POSITIVE
        if not abs(value) <= _LARGEST_ROPE:  # or NaN
            yield name, value, "a finite number"
        elif must_be_positive and value <= 0:
            yield name, value, "a positive number"
