"""load_pooled_model: reads a checkpoint into transformers' modules that compute packed texts, and their head.

Only safetensors are read, and no code of a checkpoint is run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from engine.errors import ModelLoadError
from engine.models.adapter.fit import require_fit
from engine.models.adapter.linears import pack_linears
from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.checkpoint.finite import is_finite
from engine.pooling.attention import NAME, register
from engine.pooling.checkpoint import PooledCheckpoint
from engine.pooling.heads import ClassifierHead, EmbeddingHead, Head, YesNoHead, activation_of
from engine.pooling.model import PooledModel
from engine.pooling.sentence_transformers import DenseModule
from kernels.cpu.library import library
from kernels.gelu import Gelu

__all__ = ["load_pooled_model"]

logger = logging.getLogger(__name__)


def load_pooled_model(
    checkpoint: PooledCheckpoint, task: str, *, dtype: torch.dtype | None, device: torch.device
) -> PooledModel:
    """Load the weights.

    Args:
        checkpoint: the files' description.
        task: ``embed`` or ``score``.
        dtype: of the weights; None: the checkpoint's, but float32 for float16 on a CPU, whose kernels lack it.
        device: that computes.

    Raises:
        ModelLoadError: if tensors are missing, of another shape than config.json says, or not finite.
    """
    started = perf_counter()
    register()
    model = _load(checkpoint, task, dtype, device)
    _require_finite(model, checkpoint.path)
    model = model.to(device).eval()
    packs = device.type == "cpu" and library() is not None
    head = _head(model, checkpoint, task, packs=packs)
    backbone = model.base_model
    if packs:
        pack_linears(backbone if isinstance(head, YesNoHead) else model)  # a language model's own head is not used
        _replace_gelu(backbone)
    logger.info("Loading weights took %.2f seconds", perf_counter() - started)
    return PooledModel(backbone, head, checkpoint.architecture, padding_id=model.config.pad_token_id)


def _load(checkpoint: PooledCheckpoint, task: str, dtype: torch.dtype | None, device: torch.device) -> Any:
    import transformers  # slow to import

    architecture = checkpoint.architecture
    kind: Any = transformers.AutoModel
    if task == "score":
        is_classifier = architecture.is_classifier
        kind = transformers.AutoModelForSequenceClassification if is_classifier else transformers.AutoModelForCausalLM
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with _as_load_errors(checkpoint.path):
        config = transformers.AutoConfig.from_pretrained(checkpoint.path, **options)
        own: dict[str, Any] = {"dtype": _dtype(config, dtype, device), "attn_implementation": NAME}
        with torch.device("meta"):
            skeleton = kind.from_config(config, **own)
        _require_base(skeleton, checkpoint)
        with open_checkpoint(checkpoint.path) as stored:
            # sentence-transformers saves no pooler where the model was made without.
            may_lack = "pooler." if task == "embed" else None
            require_fit(skeleton, stored, own["dtype"], has_others=True, may_lack=may_lack)
        model = kind.from_pretrained(checkpoint.path, config=config, use_safetensors=True, **own, **options)
    if task == "embed" and hasattr(model, "pooler"):
        model.pooler = None
    return model


def _require_base(model: Any, checkpoint: PooledCheckpoint) -> None:
    """Raise ModelLoadError unless a model of transformers is of the architecture that a checkpoint names."""
    base = type(model.base_model).__name__.removesuffix("Model")
    if not checkpoint.name.startswith(base):
        raise ModelLoadError(
            f"config.json of '{checkpoint.path}' names the architecture '{checkpoint.name}', but its model_type is "
            f"that of '{base}'; correct it"
        )


def _replace_gelu(model: nn.Module) -> None:
    """Let the C kernels compute transformers' exact gelu."""
    from transformers.activations import GELUActivation

    for name, child in model.named_children():
        if type(child) is GELUActivation and child.act is nn.functional.gelu:
            setattr(model, name, Gelu())
        else:
            _replace_gelu(child)


def _dtype(config: Any, wanted: torch.dtype | None, device: torch.device) -> torch.dtype:
    if wanted is not None:
        return wanted
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return torch.float32 if own == torch.float16 and device.type == "cpu" else own


@contextmanager
def _as_load_errors(path: Path) -> Iterator[None]:
    """Turn what transformers and safetensors raise for a damaged checkpoint into ModelLoadError."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:  # they raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(f"checkpoint '{path}' could not be loaded: {reason}") from error


def _require_finite(model: nn.Module, path: Path) -> None:
    for name, weight in model.named_parameters():
        if not is_finite(weight):
            raise ModelLoadError(f"'{name}' of checkpoint '{path}' holds NaN or infinity; download it again")


def _head(model: Any, checkpoint: PooledCheckpoint, task: str, *, packs: bool) -> Head:
    if task == "embed":
        layers = checkpoint.sentence.dense
        dimensions = len(checkpoint.pooling_types) * model.config.hidden_size
        if layers and layers[0].in_features != dimensions:
            first = layers[0].in_features
            raise ModelLoadError(f"a dense layer takes {first} numbers, and the pooling gives {dimensions}")
        dense = [_dense(module, model.device, packs=packs) for module in layers]
        dimensions = layers[-1].out_features if layers else dimensions
        return EmbeddingHead(checkpoint.pooling_types, dense, dimensions, normalize=checkpoint.normalize)
    if checkpoint.architecture.is_classifier:
        return ClassifierHead(model, activation_of(checkpoint.config_json, model.config.num_labels))
    return YesNoHead(_packed(_yes_no_rows(model, checkpoint.path), packs=packs))


def _dense(module: DenseModule, device: torch.device, *, packs: bool) -> tuple[nn.Module, Any]:
    layer: nn.Module = nn.Linear(module.in_features, module.out_features, bias=module.has_bias)
    file = module.directory / "model.safetensors"
    with _as_load_errors(module.directory):
        weights = {name.removeprefix("linear."): weight.float() for name, weight in load_file(file).items()}
        layer.load_state_dict(weights)
    _require_finite(layer, module.directory)
    activation = torch.tanh if module.activation == "tanh" else torch.clone
    return _packed(layer.to(device).eval(), packs=packs), activation


def _yes_no_rows(model: Any, path: Path) -> nn.Linear:
    """Return the rows of a language model's head for the tokens "no" and "yes", as a layer."""
    from engine.text.tokenizer import Tokenizer  # needs the libraries of tokenizers

    tokenizer = Tokenizer(path)
    ids = [tokenizer.single_token_id(word) for word in ("no", "yes")]
    if None in ids:
        raise ModelLoadError(f"the tokenizer of '{path}' has no single tokens for 'yes' and 'no', the answers")
    weight = model.get_output_embeddings().weight.detach()[ids]
    rows = nn.Linear(weight.shape[1], 2, bias=False, dtype=weight.dtype, device=weight.device)
    rows.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return rows


def _packed(layer: nn.Module, *, packs: bool) -> nn.Module:
    if not packs:
        return layer
    holder = nn.Sequential(layer)
    pack_linears(holder)
    return holder
