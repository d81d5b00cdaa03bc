"""read_eagle3_config: what config.json of an EAGLE-3 head says, as SafeAILab's EAGLE and as speculators write it.

EAGLE:         {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": ..., "draft_vocab_size": ...}
speculators:   {"speculators_model_type": "eagle3", "transformer_layer_config": {"hidden_size": ...},
                "draft_vocab_size": ...}
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, ModelLoadError, shown
from engine.models.config.files.hf_config import unreadable_config
from engine.models.config.files.json_file import read_json
from engine.models.config.files.other_forms import what_to_give
from engine.models.config.files.without_transformers import plain_config
from engine.models.config.model_config import ModelConfig
from engine.models.config.values.limits import require_plausible

__all__ = ["Eagle3Config", "read_eagle3_config", "refused_head"]

_LAYERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # whose layer a head has, by model_type
_SMALLEST_DEPTH = 7  # layers of a model whose default layers are different ones
_OTHER_HEADS = {"eagle": "an EAGLE-1 or EAGLE-2 head", "peagle": "a head for parallel drafting (P-EAGLE)"}


@dataclass(frozen=True)
class Eagle3Config:
    """The shape of an EAGLE-3 head.

    Attributes:
        path: of its directory.
        hf_config: of its layer, as a model of transformers.
        shape: of its layer, as a model whose vocabulary is that of the model for which it drafts.
        draft_vocab_size: tokens that it can draft.
        target_hidden_size: numbers of a hidden state that it reads.
        aux_layers: before which layers it reads them, ascending; None: the default of the model's depth.
        norm_before_residual: the normalized hidden state is also the residual stream's.
        norm_before_fc: one norm over the hidden states of all layers.
        has_layer_norms: a norm of each layer's hidden states, instead.
        norm_output: a further draft token continues from the output after the last norm.
    """

    path: str
    hf_config: Any
    shape: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool
    has_layer_norms: bool
    norm_output: bool

    def aux_layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Return before which of a model's layers it reads the hidden states.

        Raises:
            ConfigError: if the model has no such layers.
        """
        layers = self.aux_layers or (2, num_layers // 2, num_layers - 3)
        if self.aux_layers is None and num_layers < _SMALLEST_DEPTH:
            raise refused_head(self.path, f"names no layers, and of {num_layers} there are no three by default")
        if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= num_layers:
            problem = f"reads before the layers {shown(list(layers))}, which must ascend, from 0 to {num_layers}"
            raise refused_head(self.path, problem)
        return layers


def read_eagle3_config(path: str) -> Eagle3Config:
    """Read the config.json of a directory.

    Raises:
        ConfigError: if there is none, or it is of no EAGLE-3 head that is computed here.
        ModelLoadError: if it is malformed.
    """
    raw = _read_raw(path)
    is_speculators = "speculators_model_type" in raw
    _require_eagle3(raw, path)
    fields = raw.get("transformer_layer_config") if is_speculators else raw
    if not isinstance(fields, dict):
        raise _malformed(path, "transformer_layer_config", fields, "a map")
    hf_config = _layer_config(fields, path)
    shape = ModelConfig.from_hf(hf_config)
    return Eagle3Config(
        path,
        hf_config,
        replace(shape, family=replace(shape.family, prefixes=("",)), tie_word_embeddings=False),
        draft_vocab_size=_integer(raw, "draft_vocab_size", shape.vocab_size, path),
        target_hidden_size=_integer(raw, "target_hidden_size", shape.hidden_size, path),
        aux_layers=_aux_layers(raw, path),
        norm_before_residual=_flag(raw, "norm_before_residual", path, default=is_speculators),
        norm_before_fc=_flag(raw, "norm_before_fc", path),
        has_layer_norms=_flag(raw, "fc_norm", path),
        norm_output=_flag(raw, "norm_output", path),
    )


def refused_head(path: str, problem: str, remedy: str = "give an EAGLE-3 head of this model") -> ConfigError:
    """Return the error about a head that does not fit."""
    return ConfigError(problem, param="speculative_config", part="model", value=path, remedy=remedy)


def _read_raw(path: str) -> dict[str, Any]:
    directory = Path(path)
    file = directory / "config.json"
    if not directory.is_dir():
        raise refused_head(path, "is not a directory", "give the directory of an EAGLE-3 head")
    if not file.is_file():
        raise refused_head(path, "has no config.json", what_to_give(directory))
    try:
        return read_json(file)
    except OSError as error:
        raise ModelLoadError(f"config.json of '{path}' could not be read: {error}") from error


def _require_eagle3(raw: dict[str, Any], path: str) -> None:
    """Raise ConfigError if the config is of another drafter, or of a head that is computed otherwise."""
    kind, names = raw.get("speculators_model_type"), raw.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if kind is None:
        kind = "eagle3" if "eagle3" in name.lower() or name in _LAYERS.values() else name
        kind = "eagle" if "eagle" in kind.lower() and kind != "eagle3" else kind
    if kind != "eagle3":
        is_known = isinstance(kind, str) and kind in _OTHER_HEADS
        raise refused_head(path, f"is {_OTHER_HEADS[kind] if is_known else f'of type {shown(kind)}'}, not of EAGLE-3")
    eagle_config = raw.get("eagle_config")
    if isinstance(eagle_config, dict) and eagle_config.get("use_aux_hidden_state") is False:
        raise refused_head(path, "reads the last hidden state alone (use_aux_hidden_state: false)")
    if raw.get("parallel_drafting"):
        raise refused_head(path, f"is {_OTHER_HEADS['peagle']}, not of EAGLE-3")
    if raw.get("quantization_config") is not None:
        raise refused_head(path, "is quantised", "give it in bf16, fp16 or fp32; quantization quantizes it")


def _layer_config(fields: dict[str, Any], path: str) -> Any:
    """Return the config of the head's layer, as of a model of transformers."""
    model_type = fields.get("model_type", "llama")
    if not isinstance(model_type, str) or model_type not in _LAYERS:
        problem = f"has a layer of model_type {shown(model_type)}; supported: {', '.join(_LAYERS)}"
        raise refused_head(path, problem, "give another head, or choose draft_model")
    if (count := fields.get("num_hidden_layers", 1)) != 1:
        raise refused_head(path, f"has {shown(count)} layers (num_hidden_layers)", "give a head of one layer")
    own = {"architectures": [_LAYERS[model_type]], "model_type": model_type, "num_hidden_layers": 1}
    fields = {**fields, **own, "tie_word_embeddings": False}
    require_plausible(fields, path)
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if name not in fields:  # transformers would take those of Llama 7B
            raise _malformed(path, name, None, "given")
    return plain_config(fields) or _with_transformers(fields, path)


def _with_transformers(fields: dict[str, Any], path: str) -> Any:
    from transformers import CONFIG_MAPPING  # slow to import

    try:
        return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    except Exception as error:  # its classes check some values, and compute with others
        raise unreadable_config(path, error) from error


def _aux_layers(raw: dict[str, Any], path: str) -> tuple[int, ...] | None:
    """Return the layers as vLLM counts them; in ``eagle_config``, SGLang's and ModelOpt's, are those read after."""
    name, offset = "eagle_aux_hidden_state_layer_ids", 0
    layers, eagle_config = raw.get(name), raw.get("eagle_config")
    if not layers and isinstance(eagle_config, dict):
        layers, offset = eagle_config.get(name), 1
    if not layers:
        return None
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise _malformed(path, name, layers, "a list of integers")
    return tuple(layer + offset for layer in layers)


def _integer(raw: dict[str, Any], name: str, default: int, path: str) -> int:
    value = raw.get(name)
    if value is None:
        return default
    if type(value) is not int or not 0 < value < 2**24:
        raise _malformed(path, name, value, "a positive integer")
    return value


def _flag(raw: dict[str, Any], name: str, path: str, *, default: bool = False) -> bool:
    value = raw.get(name)
    if not isinstance(value, bool | None):
        raise _malformed(path, name, value, "true or false")
    return default if value is None else value


def _malformed(path: str, name: str, value: object, expected: str) -> ModelLoadError:
    return ModelLoadError(
        f"config.json of '{path}' could not be read: {name}={shown(value)} is not {expected}; correct it, or download "
        "it again"
    )
