"""Tiny checkpoints in quantised formats, written as the real ones are published, and the models that they stand for.

Each format's file of tests has a function that encodes a weight, and computes the values of the codes by itself, as the
format is documented. A model of transformers with these values is the oracle.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from engine.models.checkpoint.sharding import Shard
from engine.sampling_params import SamplingParams
from kernels.coded_weight import decode
from kernels.cpu.library import library
from kernels.dequant.stored import unpacked
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.models.adapter.greedy_answers import oracle
from tests.engine.oracle import answers, make_llm, random_tokens, run
from tests.kernels.coded_matrices import packed_words

__all__ = [
    "FILE",
    "Encoded",
    "Quantised",
    "check_codes",
    "check_tokens",
    "check_values",
    "is_linear",
    "save_quantised",
    "tiny_model",
]

FILE = "model.safetensors"
MAX_TOKENS = 6  # as the oracle's

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Encoded:
    """A weight as it is stored.

    Attributes:
        tensors: by the end of their names, ``weight_scale`` or such.
        values: what they mean, in float32 and in the weight's shape.
        code_error: what each number may be wrong by where the weight stays codes; None: the rounding of float32.
    """

    tensors: Tensors
    values: torch.Tensor
    code_error: torch.Tensor | None = None


@dataclass(frozen=True)
class Quantised:
    """A quantised checkpoint, and the model that it stands for.

    Attributes:
        path: of the checkpoint.
        model: of transformers, with the dequantised values.
        values: of the quantised weights, by name, in float32.
        code_errors: as `Encoded` has them, by name.
    """

    path: Path
    model: PreTrainedModel
    values: Tensors
    code_errors: Mapping[str, torch.Tensor | None] = field(default_factory=dict)


def tiny_model(family: str = "qwen3", **options: Any) -> PreTrainedModel:
    """Return a tiny model with sizes that blocks of 128 and groups of 32 do not divide."""
    sizes = {"hidden_size": 192, "intermediate_size": 200, "num_attention_heads": 6, "head_dim": 32}
    return build_model(family, **sizes | {"vocab_size": 120, "tie_word_embeddings": False} | options)


def is_linear(name: str) -> bool:
    """Return whether a weight is one that most checkpoints quantise: no embedding, head, router or norm."""
    return name.endswith("_proj.weight") or ".block_sparse_moe.experts." in name


def save_quantised(
    model: PreTrainedModel,
    path: Path,
    encode: Callable[[str, torch.Tensor], Encoded],
    config: dict[str, Any],
    *,
    extra: Tensors | None = None,
    chosen: Callable[[str], bool] = is_linear,
    files: dict[str, Any] | None = None,
    save: Callable[[PreTrainedModel, Path], object] = save_checkpoint,
) -> Quantised:
    """Write a checkpoint whose weights are quantised.

    Args:
        model: with the weights before.
        path: a directory for it, and for the one with the dequantised values.
        encode: from the name of a module and its weight in float32.
        config: fields that config.json gets.
        extra: further tensors.
        chosen: which weights are quantised, by name.
        files: further JSON files by name.
        save: writes the model before, with the names of published checkpoints.
    """
    plain, quantised = path / "plain", path / "quantised"
    save(model, plain)
    tensors = load_file(plain / FILE)
    encoded = {
        name: encode(name.removesuffix(".weight"), weight.float()) for name, weight in tensors.items() if chosen(name)
    }
    assert encoded
    values = {name: tensor.values.contiguous() for name, tensor in encoded.items()}
    for name, packed in encoded.items():
        assert packed.values.shape == tensors[name].shape, name
    save_file(tensors | values, plain / FILE, {"format": "pt"})
    quantised.mkdir()
    stored = {name: tensor for name, tensor in tensors.items() if name not in encoded} | (extra or {})
    for name, packed in encoded.items():
        module = name.removesuffix(".weight") if name.endswith(".weight") else name.rpartition(".")[0]
        stored |= {f"{module}.{end}": tensor.contiguous().clone() for end, tensor in packed.tensors.items()}
    save_file(stored, quantised / FILE, {"format": "pt"})
    written = json.loads((plain / "config.json").read_text()) | config
    for file, content in {"config.json": written, **(files or {})}.items():
        (quantised / file).write_text(json.dumps(content))
    errors = {name: tensor.code_error for name, tensor in encoded.items()}
    return Quantised(quantised, AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval(), values, errors)


def check_values(quantised: Quantised) -> None:
    """Assert that each weight is read as the very values, bit for bit."""
    with open_checkpoint(quantised.path) as checkpoint:
        for name, expected in quantised.values.items():
            assert checkpoint.is_packed(name), name
            checkpoint.require(name, list(expected.shape))
            read = checkpoint.read(name)
            assert torch.equal(read.view(torch.int32), expected.view(torch.int32)), name
            check_codes(checkpoint, name, expected, quantised.code_errors.get(name))


def check_codes(checkpoint: Checkpoint, name: str, values: torch.Tensor, error: torch.Tensor | None = None) -> None:
    """Assert that the codes of a weight, and of ranks' shares of it, mean the values, if it is kept as codes.

    Args:
        checkpoint: the open checkpoint.
        name: of the weight.
        values: of the weight.
        error: that each may have beside the rounding of float32.
    """
    error = 1e-9 + 1e-6 * values.abs() + (torch.zeros(()) if error is None else error)
    rows, columns = values.shape[-2:]
    shards = [None, *(Shard(0, rows, *part) for part in ((0, rows // 2), (rows // 2, rows)))]
    shards += [Shard(1, columns, *part) for part in ((0, columns // 64 * 32), (columns // 64 * 32, columns))]
    for shard in shards:
        if (form := checkpoint.code_format(name, shard)) is None:
            continue
        matrix = checkpoint.read_coded(name, shard)
        expected, allowed = (
            part if shard is None else part.narrow(shard.dim, shard.start, shard.stop - shard.start)
            for part in (values, error)
        )
        assert matrix.format == form
        assert ((decode(unpacked(matrix)) - expected).abs() <= allowed).all(), (name, shard)
        if library() is not None:
            assert torch.equal(packed_words(matrix), packed_words(unpacked(matrix))), (name, shard)


def check_tokens(quantised: Quantised, **options: Any) -> None:
    """Assert that an engine's greedy tokens are those of the model with the dequantised values."""
    rng = random.Random(3)
    prompts = [random_tokens(rng, 20, 120) for _ in range(3)]
    expected = oracle(quantised.model, prompts)
    llm = make_llm(str(quantised.path), num_blocks=32, block_size=8, **options)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    assert answers(run(llm, prompts, params)) == expected
    llm.engine.close()
