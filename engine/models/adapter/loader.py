"""load_transformers_decoder: reads a checkpoint directory into a TransformersDecoder, by transformers' own loader.

Checkpoints differ from transformers' modules in names and in how experts are stored; its loader knows the conversions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from engine.errors import ModelLoadError
from engine.models.adapter.attention import NAME, register
from engine.models.adapter.config import TransformersConfig
from engine.models.adapter.decoder import TransformersDecoder
from engine.models.adapter.linears import pack_linears
from engine.models.checkpoint import open_checkpoint
from engine.models.finite import is_finite
from engine.models.weight_errors import weights_not_finite

__all__ = ["load_transformers_decoder"]

logger = logging.getLogger(__name__)

MAX_RATIO = 2  # of a model's weights to those in its files, which may leave out tied ones


def load_transformers_decoder(
    path: str | Path,
    config: TransformersConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    use_cpu_kernels: bool = True,
    show_progress: bool = False,
) -> TransformersDecoder:
    """Build the model of a directory and fill it from its safetensors.

    Args:
        use_cpu_kernels: whether the C kernels may compute the linear layers; compiles them if need be.
        show_progress: show a bar on stderr, if that is a terminal.

    Raises:
        ModelLoadError: if tensors are missing, unexpected, of another shape than the config says, or not finite, or if
            a layer asks for attention that the paged cache does not serve.
    """
    started = perf_counter()
    with open_checkpoint(path) as checkpoint:  # refuses pickled, missing and corrupt files
        num_stored = checkpoint.num_elements
    register()
    _require_about(path, num_stored)
    with _progress_bars(show_progress):
        model = _read(path, config, dtype)
    model = model.to(device).eval()
    if use_cpu_kernels:
        pack_linears(model)
    logger.info("Computing %s with the modules of transformers", config.architecture)
    logger.info("Loading weights took %.2f seconds", perf_counter() - started)
    return TransformersDecoder(model, config)


def _require_about(path: str | Path, num_stored: int) -> None:
    """Raise ModelLoadError if config.json describes a model that is much larger than its files.

    transformers would allocate it and fill it with random numbers before its loader reports what does not fit. Names
    and shapes cannot be compared here, because the loader converts both; the number of weights stays about the same.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # slow to import

    try:
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    except Exception:  # the loader fails in the same way, and reports it
        return
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    if sum(sizes.values()) > MAX_RATIO * num_stored:
        name = max(sizes, key=sizes.__getitem__)
        raise ModelLoadError(
            f"config.json of '{path}' describes a model of {sum(sizes.values())} weights, {sizes[name]} of them in "
            f"'{name}', but the files have {num_stored}; download config.json and the weights again, from one source"
        )


def _read(path: str | Path, config: TransformersConfig, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM  # slow to import

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=dtype,
            attn_implementation=NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below, with their names
            output_loading_info=True,
        )
    except Exception as error:  # its modules compute with the values of config.json
        problem = str(error).partition("\n")[0]
        raise ModelLoadError(
            f"checkpoint '{path}' could not be loaded: {type(error).__name__}: {problem}; download config.json and the "
            "weights again, from one source"
        ) from error
    # transformers would fill what is missing or has another shape with random numbers.
    for problem in ("mismatched_keys", "missing_keys", "unexpected_keys", "error_msgs"):
        if found := sorted(map(str, info[problem])):
            kind = problem.replace("_", " ")
            raise ModelLoadError(
                f"checkpoint '{path}' does not fit its config.json: {len(found)} {kind}, {found[0]} for one; download "
                "config.json and the weights again, from one source"
            )
    for name, weight in model.named_parameters():
        if not is_finite(weight):
            with open_checkpoint(path) as checkpoint:
                # transformers may have renamed and joined the stored tensors, so any of them may be the cause.
                raise weights_not_finite(checkpoint, name, [(stored, None) for stored in checkpoint.names], dtype)
    if type(model).__name__ != config.architecture:
        raise ModelLoadError(
            f"config.json of '{path}' names the architecture '{config.architecture}', but its model_type is that of "
            f"'{type(model).__name__}'; correct it"
        )
    return model


@contextmanager
def _progress_bars(show: bool) -> Iterator[None]:
    """Show or hide transformers' progress bars in the ``with``."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.is_progress_bar_enabled()
    if not show:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            transformers_logging.enable_progress_bar()
