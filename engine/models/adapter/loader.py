"""load_transformers_decoder: reads a checkpoint directory into a TransformersDecoder, by transformers' own loader.

Checkpoints differ from transformers' modules in names and in how experts are stored; its loader knows the conversions.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import perf_counter
from types import EllipsisType
from typing import Any

import torch

from engine.errors import ConfigError, ModelLoadError
from engine.models.adapter.attention import NAME, register
from engine.models.adapter.decoder import TransformersDecoder
from engine.models.adapter.fit import loading_in_order, progress_bars, read_dtype, require_fit
from engine.models.adapter.linears import pack_linears
from engine.models.adapter.parallel import ParallelPlan
from engine.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from engine.models.checkpoint.files.read_ahead import read_ahead
from engine.models.checkpoint.finite import is_finite
from engine.models.checkpoint.own_memory import own_memory
from engine.models.checkpoint.stored_parts import Part
from engine.models.checkpoint.weight_errors import weights_not_finite
from engine.models.config.files.hf_config import read_with_transformers
from engine.models.config.transformers_config import TransformersConfig
from engine.models.tensor_parallel import TensorParallel

__all__ = ["load_transformers_decoder"]

logger = logging.getLogger(__name__)

_loading = threading.Lock()  # held while functions of transformers' loader, which are global, are replaced


def load_transformers_decoder(
    path: str | Path,
    config: TransformersConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    parallel: TensorParallel,
    use_cpu_kernels: bool = True,
    show_progress: bool = False,
) -> TransformersDecoder:
    """Build the model of a directory and fill it from its safetensors.

    Args:
        parallel: this rank and its group, which divide the model by a ``ParallelPlan``.
        use_cpu_kernels: whether the C kernels may compute the linear layers; compiles them if necessary.
        show_progress: show a bar on stderr if that is a terminal.

    Raises:
        ModelLoadError: if tensors are missing, unexpected, of another shape than the config says, or not finite, or if
            a layer asks for attention that the paged cache does not serve.
        ConfigError: if the ranks cannot divide the model.
    """
    started = perf_counter()
    register()
    with _loading, open_checkpoint(path) as checkpoint, _as_load_errors(path):
        hf_config = read_with_transformers(path)
        _forget_quantization(hf_config)
        model_class, names, plan = _check(checkpoint, hf_config, config.architecture, dtype, parallel)
        if parallel.rank == 0:
            checkpoint.log_quantised(dtype)
        with progress_bars(show_progress and sys.stderr.isatty()), plan.applied_while_loading():
            model = _read(checkpoint, names, hf_config, model_class, dtype)
    model = model.to(device).eval()
    if use_cpu_kernels:
        pack_linears(model)
    plan.connect(model)
    logger.info("Computing %s with the modules of transformers", config.architecture)
    logger.info("Loading weights took %.2f seconds", perf_counter() - started)
    return TransformersDecoder(model, config, parallel)


def _forget_quantization(hf_config: Any) -> None:
    """Let transformers take the weights as they are read, dequantised."""
    for config in (hf_config, hf_config.get_text_config()):
        if hasattr(config, "quantization_config"):
            del config.quantization_config


def _check(
    checkpoint: Checkpoint, hf_config: Any, architecture: str, dtype: torch.dtype, parallel: TensorParallel
) -> tuple[Any, list[str], ParallelPlan]:
    """Return the model's class, the tensors to read, in order, and the ranks' plan; read only the headers of the files.

    Raises:
        ModelLoadError: if the tensors do not fit the config, or the config is of another architecture.
        ConfigError: if the ranks cannot divide the model.
    """
    from transformers import AutoModelForCausalLM  # slow to import

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, attn_implementation=NAME, trust_remote_code=False
        )
    if type(model).__name__ != architecture:
        raise ModelLoadError(
            f"config.json of '{checkpoint.path}' names the architecture '{architecture}', but its model_type is that "
            f"of '{type(model).__name__}'; correct it"
        )
    plan = ParallelPlan(model, parallel)
    return type(model), require_fit(model, checkpoint, dtype), plan


def _read(checkpoint: Checkpoint, names: list[str], hf_config: Any, model_class: Any, dtype: torch.dtype) -> Any:
    """Return the model with its weights, in memory of their own.

    A view of a mapped file would keep the file's pages in memory as long as any other tensor of the file lives.

    Args:
        names: of the tensors that transformers' loader takes, in order.

    Raises:
        ModelLoadError: if a weight is not finite.
    """

    def read(name: str) -> torch.Tensor:
        checkpoint.reached(name)
        weight = own_memory(checkpoint.shape_of(name), read_dtype(checkpoint, name, dtype))
        checkpoint.read_into(weight, name)
        return weight

    def num_bytes(name: str) -> int:
        return math.prod(checkpoint.shape_of(name)) * read_dtype(checkpoint, name, dtype).itemsize

    checkpoint.expect(names)
    with closing(read_ahead(names, read, num_bytes, checkpoint.largest_file_bytes)) as weights, loading_in_order():
        model, info = model_class.from_pretrained(
            None,
            config=hf_config,
            state_dict={name: _LazyTensor(name, weights) for name in checkpoint.names},
            dtype=dtype,
            attn_implementation=NAME,
            output_loading_info=True,
        )
    # transformers fills what is missing or has another shape with random numbers; _check has refused such checkpoints,
    # and those with unexpected tensors that are not zero.
    assert not any(info[kind] for kind in ("mismatched_keys", "missing_keys", "error_msgs")), info
    for name, weight in model.named_parameters():
        if not is_finite(weight):
            # transformers may have renamed and joined the stored tensors, so any of them may be the cause.
            raise weights_not_finite(checkpoint, name, [Part(stored, None) for stored in checkpoint.names], dtype)
    return model


@contextmanager
def _as_load_errors(path: str | Path) -> Iterator[None]:
    """Turn the errors of transformers, whose modules compute with the values of config.json, into ModelLoadError."""
    try:
        yield
    except (ConfigError, ModelLoadError):
        raise
    except Exception as error:
        problem = str(error).partition("\n")[0]
        raise ModelLoadError(
            f"checkpoint '{path}' could not be loaded: {type(error).__name__}: {problem}; download config.json and the "
            "weights again, from one source"
        ) from error


class _LazyTensor:
    """A stored tensor, taken from the tensors that are read ahead when transformers' loader needs it."""

    def __init__(self, name: str, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._name, self._weights = name, weights

    def __getitem__(self, everything: EllipsisType) -> torch.Tensor:
        name, weight = next(self._weights)
        assert name == self._name
        return weight
