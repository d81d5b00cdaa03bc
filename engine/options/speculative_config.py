"""SpeculativeConfig: the options of ``speculative_config``, named as in vLLM, checked once and immutable."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any

from engine.errors import ConfigError
from engine.options.rules import apply_rules, choice, integer, name_or_null, number, optional, rules_of
from engine.options.unknown import hint
from kernels.linear.registry import QUANTIZATIONS

__all__ = ["MAX_DRAFT_TOKENS", "SpeculativeConfig"]

MAX_DRAFT_TOKENS = 128
MAX_NGRAM = 64
LONGEST_NGRAM = 5
SHORTEST_NGRAM = 3
TREE_DEPTH = 24
MAX_CACHED_REQUESTS = 10_000
_SHARED = ("method", "num_speculative_tokens")
_OPTIONS = {  # of each method
    "ngram": (*_SHARED, "prompt_lookup_max", "prompt_lookup_min"),
    "suffix": (
        *_SHARED,
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    "draft_model": (*_SHARED, "model", "quantization"),
    "mtp": _SHARED,
    "eagle3": (*_SHARED, "model", "quantization"),
}
_MODELS = {"draft_model": "draft model", "eagle3": "EAGLE-3 head"}  # of methods that need one


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The options of ``speculative_config``.

    Attributes:
        method: ``ngram``: the draft tokens are those that followed the latest earlier occurrence of the sequence's last
            tokens (prompt lookup decoding, A. Saxena, 2023). ``suffix``: those that most often followed the longest
            match of the sequence's end, in its prompt and answer or in earlier answers of the engine (SuffixDecoding,
            Oliaro et al., 2024). ``draft_model``: those that a smaller model samples with the same noise, so that it
            agrees with the large one where their distributions are alike (Daliri et al., 2024, arXiv 2408.07978).
            ``mtp``: those that the checkpoint's own layer of multi-token prediction samples, with the same noise too.
            ``eagle3``: those that an EAGLE-3 head samples, likewise (Li et al., 2025, arXiv 2503.01840).
            With any of them, the ``prediction`` of a request comes first.
        num_speculative_tokens: most draft tokens of a sequence in one step, at most 128; with ``suffix`` the default is
            suffix_decoding_max_tree_depth, and with ``mtp`` 1. With ``max_decode_slowdown``, fewer are computed where
            they do not pay.
        prompt_lookup_max: longest n-gram that is looked up; default 5, or prompt_lookup_min if that is more.
        prompt_lookup_min: shortest n-gram; default 3, or prompt_lookup_max if that is less.
        suffix_decoding_max_tree_depth: most tokens of a match and of the draft after it together.
        suffix_decoding_max_cached_requests: answers that are kept to draft from, besides a limit on their tokens
            (earlier_answers.py); 0: drafts come from the sequence itself only.
        suffix_decoding_max_spec_factor: most draft tokens for each token of the match.
        suffix_decoding_min_token_prob: a draft ends before a token whose probability, by how often it and those before
            it followed the match, is less.
        model: of ``draft_model``, its checkpoint, as ``model`` of the engine; with the same vocabulary as that. Of
            ``eagle3`` the directory of the head.
        quantization: of that model or head, as ``quantization`` of the engine.

    Raises:
        ConfigError: for any value out of range.
    """

    method: Annotated[str, choice(*_OPTIONS)]
    num_speculative_tokens: Annotated[int, integer(1, MAX_DRAFT_TOKENS)]
    prompt_lookup_max: Annotated[int, integer(1, MAX_NGRAM)] = LONGEST_NGRAM
    prompt_lookup_min: Annotated[int, integer(1, MAX_NGRAM)] = SHORTEST_NGRAM
    suffix_decoding_max_tree_depth: Annotated[int, integer(2, MAX_DRAFT_TOKENS)] = TREE_DEPTH
    suffix_decoding_max_cached_requests: Annotated[int, integer(0)] = MAX_CACHED_REQUESTS
    suffix_decoding_max_spec_factor: Annotated[float, number(0.0, MAX_DRAFT_TOKENS)] = 1.0
    suffix_decoding_min_token_prob: Annotated[float, number(0.0, 1.0)] = 0.1
    model: Annotated[str | None, name_or_null] = None
    quantization: Annotated[str | None, optional(choice(*QUANTIZATIONS))] = None

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        apply_rules(self, _RULES, ConfigError, "speculative_config")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"exceeds prompt_lookup_max={self.prompt_lookup_max}",
                param="speculative_config",
                part="prompt_lookup_min",
                value=self.prompt_lookup_min,
                remedy="lower it",
            )
        if self.method in _MODELS and self.model is None:
            remedy = f"give the checkpoint of the {_MODELS[self.method]}"
            raise ConfigError("is missing", param="speculative_config", part="model", remedy=remedy)

    @classmethod
    def from_options(cls, options: Any) -> SpeculativeConfig:
        """Build a config from untyped options of YAML or keyword arguments.

        Raises:
            ConfigError: if ``options`` is not a map, an option is missing, unknown or of another method, or a value is
                out of range.
        """
        example = "give, say, {'method': 'ngram', 'num_speculative_tokens': 4}"
        if not isinstance(options, dict):
            raise ConfigError("must be a map", param="speculative_config", value=options, remedy=example)
        known = list(cls.__dataclass_fields__)
        for name in options:
            if name not in known:
                problem = f"has the unknown option '{name}'"
                raise ConfigError(problem, param="speculative_config", remedy=hint(name, known))
        values = _defaults(options) | options
        for name in _SHARED:
            if name not in values:
                raise ConfigError(f"lacks {name}", param="speculative_config", value=options, remedy=example)
        _check_method(options)
        return cls(**values)


_RULES = rules_of(SpeculativeConfig)


def _check_method(options: dict[str, Any]) -> None:
    """Raise ConfigError if an option has no effect with the method."""
    method = options["method"]
    for name in options:
        if isinstance(method, str) and name not in _OPTIONS.get(method, options):
            other = next(other for other, names in _OPTIONS.items() if name in names)
            raise ConfigError(
                f"is an option of method '{other}', not of '{method}'",
                param="speculative_config",
                part=name,
                value=options[name],
                remedy="remove it, or change the method",
            )


def _defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults that depend on other options."""
    longest, shortest = options.get("prompt_lookup_max"), options.get("prompt_lookup_min")
    lengths = {
        "prompt_lookup_max": max(LONGEST_NGRAM, shortest) if isinstance(shortest, int) else LONGEST_NGRAM,
        "prompt_lookup_min": min(SHORTEST_NGRAM, longest) if isinstance(longest, int) else SHORTEST_NGRAM,
    }
    if options.get("method") == "mtp":
        return lengths | {"num_speculative_tokens": 1}
    if options.get("method") != "suffix":
        return lengths
    depth = options.get("suffix_decoding_max_tree_depth", TREE_DEPTH)
    return lengths | {"num_speculative_tokens": min(depth, MAX_DRAFT_TOKENS) if isinstance(depth, int) else TREE_DEPTH}
