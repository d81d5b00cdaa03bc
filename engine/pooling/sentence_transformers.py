"""The files that sentence-transformers keeps beside a model: which modules follow it, how it pools, its prompts.

https://sbert.net describes modules.json, 1_Pooling/config.json, sentence_bert_config.json and
config_sentence_transformers.json. A file that asks for something else is an error, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError, shown
from engine.models.config.files.json_file import read_json
from engine.pooling.config import POOLING_TYPES

__all__ = ["DenseModule", "SentenceTransformer", "read_sentence_transformer"]

_PREFIX = "pooling_mode_"
_MODES = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": "weighted_mean",
    "lasttoken": "last",
}
_SPELLINGS = {"weightedmean": "weighted_mean", "lasttoken": "last"}  # in ``pooling_mode`` of newer files
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh"}


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer after pooling.

    Attributes:
        directory: of its weights.
        activation: ``identity`` or ``tanh``.
    """

    directory: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class SentenceTransformer:
    """What the files say.

    Attributes:
        pooling_types: the vectors that are computed and joined; empty: the files do not say.
        dense: linear layers after pooling, in order.
        normalize: whether vectors are normalised; None: there is no modules.json.
        max_tokens: longest text; None: not said.
        prompts: by name.
        default_prompt: the name of one of them.
    """

    pooling_types: tuple[str, ...] = ()
    dense: tuple[DenseModule, ...] = ()
    normalize: bool | None = None
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_sentence_transformer(path: str | Path) -> SentenceTransformer:
    """Read the files of a directory that has any of them.

    Raises:
        ModelLoadError: if a file is malformed or names a module that is not served.
    """
    root = Path(path)
    prompts, default_prompt = _prompts(root)
    pooling: tuple[str, ...] = ()
    dense: list[DenseModule] = []
    normalize: bool | None = None
    if (root / "modules.json").is_file():
        normalize = False
        for kind, directory in _modules(root):
            if kind == "Transformer" and directory == root:
                continue
            if kind == "Pooling":
                pooling = _pooling_types(directory, has_prompts=bool(prompts))
            elif kind == "Dense":
                dense.append(_dense(directory))
            elif kind == "Normalize":
                normalize = True
            else:
                raise ModelLoadError(
                    f"modules.json of '{path}' has the module {shown(kind)} in '{directory}', which is not served; "
                    "docs/embeddings.md lists what is"
                )
    return SentenceTransformer(pooling, tuple(dense), normalize, _max_tokens(root), prompts, default_prompt)


def _object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no file."""
    if not file.is_file():
        return {}
    try:
        content = read_json(file)
    except OSError as error:
        raise ModelLoadError(f"'{file}' could not be read: {error}") from error
    return content


def _modules(root: Path) -> list[tuple[str, Path]]:
    """Return the type and the directory of each module, in order."""
    try:
        modules = json.loads((root / "modules.json").read_text(encoding="utf-8"))
        ordered = sorted(modules, key=lambda module: module["idx"])
        pairs = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in ordered]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"modules.json of '{root}' is malformed: {error}; correct it") from None
    for _, directory in pairs:
        if Path(directory).is_absolute() or ".." in Path(directory).parts:
            raise ModelLoadError(f"modules.json of '{root}' names the path {shown(directory)} outside the model")
    return [(kind, root / directory) for kind, directory in pairs]


def _pooling_types(directory: Path, *, has_prompts: bool) -> tuple[str, ...]:
    config = _object(directory / "config.json")
    named = config.get("pooling_mode")
    if named is not None:
        names = named if isinstance(named, list) else [named]
        kinds = [_SPELLINGS.get(str(name), str(name)) for name in names]
    else:
        kinds = [kind for name, kind in _MODES.items() if config.get(_PREFIX + name)]
    if not kinds or not set(kinds) <= set(POOLING_TYPES):
        raise ModelLoadError(
            f"'{directory / 'config.json'}' asks for the pooling {shown(named or kinds)}; {', '.join(POOLING_TYPES)} "
            "are served"
        )
    if has_prompts and config.get("include_prompt", True) is False:
        raise ModelLoadError(f"'{directory / 'config.json'}' has include_prompt=false, which is not served")
    return tuple(kinds)


def _dense(directory: Path) -> DenseModule:
    config = _object(directory / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    inputs, outputs = config.get("in_features"), config.get("out_features")
    if activation not in _ACTIVATIONS or not (type(inputs) is int and type(outputs) is int and inputs and outputs):
        raise ModelLoadError(
            f"'{directory / 'config.json'}' asks for a dense layer of {shown(inputs)} to {shown(outputs)} numbers with "
            f"{shown(activation)}; {' and '.join(_ACTIVATIONS)} are served"
        )
    return DenseModule(directory, inputs, outputs, bool(config.get("bias", True)), _ACTIVATIONS[activation])


def _max_tokens(root: Path) -> int | None:
    longest = _object(root / "sentence_bert_config.json").get("max_seq_length")
    return longest if type(longest) is int and longest > 0 else None


def _prompts(root: Path) -> tuple[dict[str, str], str | None]:
    config = _object(root / "config_sentence_transformers.json")
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelLoadError(f"config_sentence_transformers.json of '{root}' has prompts={shown(prompts)}; correct it")
    if default is not None and default not in prompts:
        raise ModelLoadError(
            f"config_sentence_transformers.json of '{root}' has default_prompt_name={shown(default)}, which is none of "
            f"its prompts ({', '.join(prompts) or 'it has none'}); correct it"
        )
    return prompts, default
