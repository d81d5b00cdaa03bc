"""SpeculativeConfig: how tokens are guessed before the model says them, checked once."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError

__all__ = ["SpeculativeConfig"]

MAX_DRAFT_TOKENS = 128
MAX_NGRAM = 64
LONGEST_NGRAM = 5
SHORTEST_NGRAM = 3


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The options of ``speculative_config``, named as in vLLM.

    Attributes:
        method: ``ngram``: what followed the latest earlier occurrence of a sequence's last tokens is guessed to follow
            again (prompt lookup decoding, A. Saxena, 2023).
        num_speculative_tokens: guessed in one step, at most 128.
        prompt_lookup_max: last tokens that are looked for, at most; default 5, or the least if that is more.
        prompt_lookup_min: and at least; default 3, or the most if that is less.

    Raises:
        ConfigError: for any value out of range.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int

    def __post_init__(self) -> None:
        if self.method != "ngram":
            raise ConfigError(f"speculative_config has method={self.method!r}; the only one is 'ngram'")
        self._require("num_speculative_tokens", MAX_DRAFT_TOKENS)
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            self._require(name, MAX_NGRAM)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config has prompt_lookup_min={self.prompt_lookup_min}, more than "
                f"prompt_lookup_max={self.prompt_lookup_max}; lower it"
            )

    def _require(self, name: str, most: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ConfigError(f"speculative_config has {name}={value!r}; give an integer of 1 to {most}")

    @classmethod
    def from_options(cls, options: Any) -> SpeculativeConfig:
        """Build it from untyped options, as YAML or keyword arguments give them.

        Raises:
            ConfigError: for what is no map, an option that is unknown or missing, or a value out of range.
        """
        example = "{'method': 'ngram', 'num_speculative_tokens': 4}"
        if not isinstance(options, dict):
            raise ConfigError(f"speculative_config={options!r} must be a map; give, say, {example}")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f"known ones: {', '.join(known)}"
                raise ConfigError(f"speculative_config has the unknown option '{name}'; {hint}")
        for name in ("method", "num_speculative_tokens"):
            if name not in options:
                raise ConfigError(f"speculative_config={options!r} lacks {name}; give, say, {example}")
        return cls(**(_default_lengths(options) | options))


def _default_lengths(options: dict[str, Any]) -> dict[str, Any]:
    """Return lengths of n-grams that go with the one that is given, if one is."""
    longest, shortest = options.get("prompt_lookup_max"), options.get("prompt_lookup_min")
    return {
        "prompt_lookup_max": max(LONGEST_NGRAM, shortest) if isinstance(shortest, int) else LONGEST_NGRAM,
        "prompt_lookup_min": min(SHORTEST_NGRAM, longest) if isinstance(longest, int) else SHORTEST_NGRAM,
    }
