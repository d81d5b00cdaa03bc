"""The engine's options on the command lines of the benchmarks."""

from __future__ import annotations

import argparse
from typing import Any

import yaml

from benchmarks.peers import runner

__all__ = ["add_engine_arguments", "engine_options", "parse_option"]


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model and the options that engine_options reads."""
    parser.add_argument("--model", required=True, help="directory of a checkpoint")
    parser.add_argument("--dtype", default="auto", help="of weights and KV cache; default: the checkpoint's")
    parser.add_argument("--quantization", help="of the weights, if any: int8")
    parser.add_argument("--max-model-len", type=int, default=runner.MAX_MODEL_LEN)
    parser.add_argument("--max-num-seqs", type=int, default=runner.MAX_NUM_SEQS)
    parser.add_argument("--max-num-batched-tokens", type=int, default=runner.MAX_NUM_BATCHED_TOKENS)
    parser.add_argument(
        "--engine-option", action="append", default=[], metavar="KEY=VALUE", help="any other option, the value as YAML"
    )


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options under the engine's names, without the model.

    Raises:
        ValueError: for an --engine-option that is not KEY=VALUE.
    """
    options: dict[str, Any] = {
        "dtype": arguments.dtype,
        "max_model_len": arguments.max_model_len,
        "max_num_seqs": arguments.max_num_seqs,
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
        "kv_cache_memory": f"{runner.KV_CACHE_GIB}GiB",
    }
    if arguments.quantization:  # only then: older engines do not know it
        options["quantization"] = arguments.quantization
    for option in arguments.engine_option:
        options |= parse_option(option)
    return options


def parse_option(text: str) -> dict[str, Any]:
    """Return the engine's option in KEY=VALUE, the value as YAML.

    Raises:
        ValueError: if it is not one.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"the engine's option {text!r} is no KEY=VALUE; give, say, block_size=32")
    return {key: yaml.safe_load(value)}
