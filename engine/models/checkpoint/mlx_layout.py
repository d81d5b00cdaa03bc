"""with_mlx_layout: the weights of a checkpoint that MLX has written, as the model has them.

mlx-lm's converter changes some layers, whether or not it quantises them:

switch_mlp.gate_proj.weight [experts, out, in]   experts.N.gate_proj.weight, in some families .w1.weight, or the first
                                                 rows of Granite's input_linear.weight
self_attn.embed_q.weight, unembed_out.weight     the rows of kv_b_proj.weight: those of queries are transposed
conv1d.weight [channels, width, 1]               [channels, 1, width]
norms of Qwen3-Next and Qwen 3.5                 are one larger
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.errors import ModelLoadError
from engine.models.checkpoint.composed_weight import ComposedWeight, Entry, matrix_of, turned
from engine.models.checkpoint.files.safetensors_header import StoredTensor
from engine.models.checkpoint.packed_weight import PackedWeight

__all__ = ["with_joined_latents", "with_mlx_layout"]

_STACK = re.compile(
    r"(.*)\.(?:(?:switch_mlp|experts\.switch_glu)\.(\w+)|experts\.(gate_proj|up_proj|down_proj))\.weight"
)
_LETTERS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_RENAMED = {  # by the block that the experts are in
    "block_sparse_moe": _LETTERS,
    "feed_forward": _LETTERS,
    "mixer": {"fc1": "up_proj", "fc2": "down_proj"},
}
_GRANITE_ROUTER = "router.layer.weight"
_DENSE_GRANITE = re.compile(r"(.*\.layers\.\d+)\.mlp\.(gate_proj|down_proj)\.weight")
_CONVOLUTIONS = ("conv1d.weight", "conv.conv.weight")
_NORMS = (
    *(".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight"),
    *(".q_norm.weight", ".k_norm.weight"),
)
_LARGER_NORMS = ("Qwen3Next", "Qwen3_5")  # how the names of architectures begin


@dataclass(frozen=True, kw_only=True, eq=False)
class _OneLess(PackedWeight):
    """A vector that is stored with one added to each number."""

    format = "MLX"

    def dequantise(
        self, parts: Mapping[str, torch.Tensor], rows: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return numbers of the vector, float32 [len(rows), 1]."""
        return (parts["weight"].float() - 1.0).view(-1, 1)


def with_mlx_layout(architecture: str | None, weights: dict[str, Entry]) -> dict[str, Entry]:
    """Return the weights by the names, and with the numbers, that the model has; others' layouts are left as they are.

    Args:
        architecture: as config.json names it.
        weights: by the names in the files.

    Raises:
        ModelLoadError: if MLX has multiplied the config's factors into the weights (Falcon-H1).
    """
    result: dict[str, Entry] = {}
    for name, entry in weights.items():
        result |= _of_each_expert(name, entry, weights)
    if architecture == "GraniteMoeHybridForCausalLM":
        result = _with_joined_gates(result)
    result = with_joined_latents(result)
    turned_back = {name: _turned_convolution(entry) for name, entry in result.items() if name.endswith(_CONVOLUTIONS)}
    if all(result[name] is entry for name, entry in turned_back.items()):
        return result
    if architecture is not None and architecture.startswith("FalconH1"):
        name = next(iter(turned_back))
        raise ModelLoadError(
            f"'{name}' of '{result[name].path}' is in MLX's layout, in which the factors of Falcon-H1 are in the "
            "weights, which is not supported; give the checkpoint with the original weights"
        )
    if architecture is not None and architecture.startswith(_LARGER_NORMS):
        turned_back |= {name: _one_less(name, entry) for name, entry in result.items() if name.endswith(_NORMS)}
    return result | turned_back


def _of_each_expert(name: str, entry: Entry, weights: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the weights of the experts that ``entry`` stacks, or Granite's, which the model stacks too; or itself."""
    match = _STACK.fullmatch(name)
    if match is None or len(entry.shape) != 3 or isinstance(entry, ComposedWeight):
        return {name: entry}
    block, matrix = match[1], match[2] or match[3]
    experts = range(entry.shape[0])
    if f"{block}.{_GRANITE_ROUTER}" in weights:
        return _of_granite(block, matrix, entry, weights)
    matrix = _RENAMED.get(block.rpartition(".")[2], {}).get(matrix, matrix)
    return {f"{block}.experts.{expert}.{matrix}.weight": matrix_of(entry, expert) for expert in experts}


def _of_granite(
    block: str, matrix: str, entry: StoredTensor | PackedWeight, weights: Mapping[str, Entry]
) -> dict[str, Entry]:
    if matrix == "down_proj":
        return {f"{block}.output_linear.weight": entry}
    up = weights.get(f"{block}.switch_mlp.up_proj.weight")
    if matrix != "gate_proj" or up is None or up.shape != entry.shape or isinstance(up, ComposedWeight):
        return {}  # is added with the gates, or lacking
    pairs = (
        ComposedWeight((matrix_of(entry, expert), matrix_of(up, expert)), "rows") for expert in range(entry.shape[0])
    )
    return {f"{block}.input_linear.weight": ComposedWeight(tuple(pairs), "stacked")}


def _with_joined_gates(weights: dict[str, Entry]) -> dict[str, Entry]:
    """Return the weights with a dense Granite's gates and ups in one."""
    result = dict(weights)
    for name in weights:
        match = _DENSE_GRANITE.fullmatch(name)
        if match is None:
            continue
        block = f"{match[1]}.shared_mlp"
        if match[2] == "down_proj":
            result[f"{block}.output_linear.weight"] = result.pop(name)
        elif (up := name.replace("gate_proj", "up_proj")) in weights:
            result[f"{block}.input_linear.weight"] = ComposedWeight((result.pop(name), result.pop(up)), "rows")
    return result


def with_joined_latents(weights: dict[str, Entry]) -> dict[str, Entry]:
    """Return the weights with the two halves of each head of ``kv_b_proj`` in one; GGUF files have halves, too."""
    result = dict(weights)
    for name, keys in weights.items():
        module = name.removesuffix(".embed_q.weight")
        values = weights.get(f"{module}.unembed_out.weight")
        if module == name or values is None or isinstance(keys, ComposedWeight) or isinstance(values, ComposedWeight):
            continue
        if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[0] != values.shape[0]:
            continue
        heads = ((turned(matrix_of(keys, head)), matrix_of(values, head)) for head in range(keys.shape[0]))
        del result[name], result[f"{module}.unembed_out.weight"]
        joined = ComposedWeight(tuple(half for head in heads for half in head), "rows")
        result[f"{module}.kv_b_proj.weight"] = joined
    return result


def _turned_convolution(entry: Entry) -> Entry:
    """Return a convolution as [channels, 1, width], the same bytes; others as they are."""
    if isinstance(entry, StoredTensor) and len(entry.shape) == 3 and entry.shape[1] > entry.shape[2] == 1:
        return entry._replace(shape=(entry.shape[0], 1, entry.shape[1]))
    return entry


def _one_less(name: str, entry: Entry) -> Entry:
    if not isinstance(entry, StoredTensor) or len(entry.shape) != 1:
        return entry
    return _OneLess(name=name, parts={"weight": entry}, shape=entry.shape, read_by_rows=frozenset({"weight"}))
