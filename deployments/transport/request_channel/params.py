"""SamplingParams as a map of plain values, of the parameters that differ from their defaults."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from engine.options.thinking_budget import ThinkingBudget
from engine.sampling_params import SamplingParams
from engine.structured_outputs.params import StructuredOutputsParams

__all__ = ["pack_params", "unpack_params"]

_STRUCTURED, _THINKING = "structured_outputs", "thinking_budget"
_TEXTS = ("stop", "bad_words")  # may hold half characters, which msgpack's strings cannot
_UNBOUNDED = ("top_k", "max_tokens", "min_tokens")
_MAX_INT = 2**63 - 1  # a larger bound has the same effect, and does not fit
_DEFAULTS = SamplingParams()  # as the constructor keeps them: ``stop`` is an empty tuple
_PARAMETERS = [
    (one.name, getattr(_DEFAULTS, one.name))
    for one in fields(SamplingParams)
    if one.name not in (_STRUCTURED, _THINKING)
]


def pack_params(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters as msgpack can carry them."""
    values = vars(params)
    packed = {name: values[name] for name, default in _PARAMETERS if values[name] != default}
    for name in _TEXTS:
        if name in packed:
            packed[name] = [text.encode(errors="surrogatepass") for text in packed[name]]
    for name in _UNBOUNDED:
        if (value := packed.get(name)) is not None:
            packed[name] = min(value, _MAX_INT)
    if (form := params.structured_outputs) is not None:
        packed[_STRUCTURED] = {form.kind: getattr(form, form.kind)}
    if params.thinking_budget is not None:
        packed[_THINKING] = asdict(params.thinking_budget)
    return packed


def unpack_params(packed: dict[str, Any]) -> SamplingParams:
    """Return the parameters that ``pack_params`` has packed.

    Raises:
        RequestError: a value is out of range.
        TypeError, ValueError, AttributeError: nothing that was packed.
    """
    values = dict(packed)
    for name in _TEXTS:
        if name in values:
            values[name] = [text.decode(errors="surrogatepass") for text in values[name]]
    if (form := values.get(_STRUCTURED)) is not None:
        values[_STRUCTURED] = StructuredOutputsParams(**form)
    if (budget := values.get(_THINKING)) is not None:
        values[_THINKING] = ThinkingBudget(**budget)
    return SamplingParams(**values)
