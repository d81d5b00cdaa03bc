"""SamplingParams: how one request wants its tokens chosen and when it wants them to end.

Values are checked when the object is made, so that whoever holds one may trust it. It knows nothing of a model: ids
are compared with the vocabulary when the request is added to an engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import RequestError

__all__ = ["MAX_STOP_STRINGS", "SamplingParams"]

MAX_STOP_STRINGS = 4
MAX_STOP_TOKEN_IDS = 1024


def _require_number(name: str, value: object, low: float, high: float, interval: str) -> None:
    """Refuse ``value`` unless it is a finite number in [low, high]; ``interval`` is how the message writes it."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high:  # type: ignore[operator]  # NaN is in no interval
        raise RequestError(f"{name}={value!r} is out of range; give a finite number in {interval}", name)


def _require_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"at least {low} and at most {high}"
        raise RequestError(f"{name}={value!r} is out of range; give an integer of {limit}", name)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, named as in vLLM and in the OpenAI API.

    Attributes:
        temperature: in [0, 2]; 0 is greedy.
        top_p: nucleus mass in (0, 1].
        top_k: the k likeliest tokens; 0 or -1 is off.
        min_p: least probability relative to the likeliest token, in [0, 1].
        seed: int64; the same seed gives the same tokens whatever else is in the batch. None draws one.
        max_tokens: tokens generated at most; None is what is left of the context.
        min_tokens: nothing stops the sequence before so many: no stop token is generated, no stop string looked for.
        stop: at most 4 strings that end the text (checked where text is made, not in the engine).
        stop_token_ids: at most 1,024 ids that end the sequence besides the model's own EOS ids.
        include_stop_str_in_output: keep the stop string at the end of the text.
        ignore_eos: go on after the model's EOS ids.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        RequestError: for a value out of range; its ``param`` is the parameter's name.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, 0.0, 2.0, "[0, 2]")
        _require_number("top_p", self.top_p, math.nextafter(0.0, 1.0), 1.0, "(0, 1]")
        _require_number("min_p", self.min_p, 0.0, 1.0, "[0, 1]")
        _require_int("top_k", self.top_k, -1)
        _require_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; lower it", "min_tokens"
                )
        if self.seed is not None:
            _require_int("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r} must be true or false", name)
        self._check_stops()

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, value in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            if value is not None and not isinstance(value, list | tuple):
                raise RequestError(f"{name}={value!r} must be a list", name)
        strings = tuple(stop or ())
        if len(strings) > MAX_STOP_STRINGS:
            raise RequestError(f"stop has {len(strings)} strings; give at most {MAX_STOP_STRINGS}", "stop")
        for string in strings:
            if not isinstance(string, str) or not string:
                raise RequestError(f"stop contains {string!r}; give strings that are not empty", "stop")
        ids = tuple(self.stop_token_ids or ())
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids has {len(ids)} ids; give at most {MAX_STOP_TOKEN_IDS}", "stop_token_ids"
            )
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise RequestError(f"stop_token_ids contains {token_id!r}; give ids of at least 0", "stop_token_ids")
        object.__setattr__(self, "stop", strings)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, as a tuple whatever form they were given in."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without drawing."""
        return self.temperature == 0.0
