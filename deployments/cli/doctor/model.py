"""A model's files: config, weights with their shapes and dtypes, tokenizer, chat template, parsers."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deployments.cli.doctor.finding import Finding, State
from deployments.config import AppConfig
from engine.errors import PagodaError

__all__ = ["check_model"]

EMBEDDING = "embed_tokens.weight"
GENERATION_CONFIG = "generation_config.json"


def check_model(path: str) -> Iterable[Finding]:
    """Check a checkpoint's directory or a GGUF file; no tensor is read."""
    try:
        config = AppConfig.parse({"model": path})
        config.require_model()
    except PagodaError as error:
        yield _error("model", error)
        return
    try:
        yield from _shape(config)
    except PagodaError as error:
        yield _error("config.json", error)
    try:
        yield from _weights(config.model_path)
    except PagodaError as error:
        yield _error("weights", error)
    if config.model_path.is_dir():
        yield from _generation_config(config.model_path)
    try:
        yield from _text(config)
    except PagodaError as error:
        yield _error("tokenizer", error)


def _error(subject: str, error: PagodaError) -> Finding:
    """Return the finding for an error, whose message ends with the remedy after a semicolon."""
    text, _, remedy = str(error).rpartition("; ")
    return Finding(subject, State.ERROR, text or str(error), remedy if text else "replace the model's files")


def _shape(config: AppConfig) -> Iterable[Finding]:
    from engine.models.config.files.hf_config import load_hf_config
    from engine.models.config.implementation import read_shape
    from engine.models.config.model_config import ModelConfig

    shape = read_shape(load_hf_config(config.model_path), config.engine_config.model_impl)
    by = "our own decoder" if isinstance(shape, ModelConfig) else "transformers' modules"
    context = shape.context_length(None)
    yield Finding("config.json", State.OK, f"{shape.architecture}, computed by {by}; context {context:,} tokens")


def _weights(path: Path) -> Iterable[Finding]:
    from engine.models.checkpoint.checkpoint import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        names = checkpoint.names
        num_values = sum(math.prod(checkpoint.shape_of(name)) for name in names)
        packed = sum(checkpoint.is_packed(name) for name in names)
        dtypes = Counter(
            "packed" if checkpoint.is_packed(name) else str(checkpoint.dtype_of(name)).removeprefix("torch.")
            for name in names
        )
        sizes = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
        yield Finding("weights", State.OK, f"{len(names)} tensors ({sizes}), {num_values / 1e6:,.1f} million numbers")
        embedding = next((name for name in names if name.endswith(EMBEDDING)), None)
        if embedding is not None and not packed:
            yield from _embedding(path, checkpoint.shape_of(embedding), embedding)


def _embedding(path: Path, shape: tuple[int, ...], name: str) -> Iterable[Finding]:
    """Check the shape of the token embedding; all others are checked when the model is loaded."""
    from engine.models.config.files.config_json import read_config_json
    from engine.models.config.files.text_parts import text_fields

    fields = text_fields(read_config_json(path))
    expected = (fields.get("vocab_size"), fields.get("hidden_size"))
    if None not in expected and shape != expected:
        remedy = "download config.json and the weights of one revision again"
        text = f"'{name}' has the shape {list(shape)}, config.json says {list(expected)}"
        yield Finding("weights", State.ERROR, text, remedy)


def _generation_config(path: Path) -> Iterable[Finding]:
    file = path / GENERATION_CONFIG
    if not file.is_file():
        remedy = f"copy {GENERATION_CONFIG} from the model's repository, if it has one"
        yield Finding("generation", State.NOTE, f"no {GENERATION_CONFIG}: answers end at config.json's eos", remedy)
        return
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        yield Finding("generation", State.ERROR, f"{GENERATION_CONFIG} is not JSON ({error})", "download it again")
        return
    yield Finding("generation", State.OK, f"answers end at token {content.get('eos_token_id', 'of config.json')}")


def _text(config: AppConfig) -> Iterable[Finding]:
    from deployments.parsers.registry import Parsers

    tokenizer = config.load_tokenizer(config.model_path)
    yield Finding("tokenizer", State.OK, f"{len(tokenizer):,} tokens")
    chat_template = tokenizer.chat_template
    if not chat_template.exists:
        remedy = "set args.chat_template for /v1/chat/completions; /v1/completions works without"
        yield Finding("chat template", State.WARNING, "there is none, so chat requests are rejected", remedy)
        return
    template = chat_template.source
    parsers = Parsers.choose(template, None, None, chat_template.response_template)
    tool, reasoning = (name or "none" for name in (parsers.tool, parsers.reasoning))
    yield Finding("chat template", State.OK, f"{len(template):,} characters")
    if parsers.tool is None and "tools" in template:
        remedy = "set args.tool_parser if the model calls tools (docs/api.md lists the formats)"
        yield Finding("parsers", State.NOTE, "the template takes tools, in a form that is not recognised", remedy)
    yield Finding("parsers", State.OK, f"tool_parser {tool}, reasoning_parser {reasoning}")
