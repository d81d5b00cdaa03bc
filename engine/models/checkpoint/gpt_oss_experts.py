"""with_stacked_experts: the experts of GPT-OSS as the model has them, from the layouts of other programs.

    experts.gate_up_proj [experts, in, 2 * inner], experts.gate_up_proj_bias: gates and ups alternate
    experts.down_proj [experts, inner, out], experts.down_proj_bias

experts.5.gate_proj.weight [inner, in], .up_proj, .down_proj    llm-compressor's, and MLX's after mlx_layout.py
experts.gate_proj.bias [experts, inner], .up_proj, .down_proj   MLX's
experts.gate_up_projs.5.weight [2 * inner, in], .down_projs.5   Unsloth's, quantised with bitsandbytes
router.linear.weight                                            router.weight, Unsloth's
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

from engine.models.checkpoint.composed_weight import ComposedWeight, Entry, stack, turned

__all__ = ["with_stacked_experts"]

_NUMBERED = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|bias)")
_LISTED = re.compile(r"(.*\.experts)\.(gate_up|down)_projs\.(\d+)\.(weight|bias)")
_BIASES = re.compile(r"(.*\.experts)\.(gate_proj|up_proj|down_proj)\.bias")
_ROUTER = ".mlp.router.linear."
_SUFFIX = {"weight": "", "bias": "_bias"}
_GATE, _UP = "gate_proj", "up_proj"
_JOINED = {_GATE: "gate_up_proj"}


def with_stacked_experts(architecture: str | None, weights: dict[str, Entry]) -> dict[str, Entry]:
    """Return the weights with the experts of GPT-OSS stacked; those of other models, and incomplete ones, as they are.

    Args:
        architecture: as config.json names it.
        weights: by name.
    """
    if architecture != "GptOssForCausalLM":
        return weights
    result: dict[str, Entry] = {}
    numbered: dict[tuple[str, str, str], dict[int, Entry]] = defaultdict(dict)  # by block, matrix and kind
    for name, entry in weights.items():
        if match := _NUMBERED.fullmatch(name):
            block, number, matrix, kind = match.groups()
            numbered[block, matrix, kind][int(number)] = entry
        elif match := _LISTED.fullmatch(name):
            block, matrix, number, kind = match.groups()
            numbered[block, f"{matrix}_proj", kind][int(number)] = entry
        elif (match := _BIASES.fullmatch(name)) and len(entry.shape) == 2:
            result |= _bias(match[1], match[2], entry, weights)
        else:
            result[name.replace(_ROUTER, ".mlp.router.")] = entry
    for (block, matrix, kind), members in numbered.items():
        parts = _turned(members) if kind == "weight" else members
        if matrix == _GATE:
            ups = numbered.get((block, _UP, kind), {})
            parts = _alternating(parts, _turned(ups) if kind == "weight" else ups)
        if matrix != _UP and (stacked := stack(parts)) is not None:
            result[f"{block}.{_JOINED.get(matrix, matrix)}{_SUFFIX[kind]}"] = stacked
    return result


def _turned(members: Mapping[int, Entry]) -> dict[int, Entry]:
    return {number: turned(member) for number, member in members.items()}


def _alternating(gates: Mapping[int, Entry], ups: Mapping[int, Entry]) -> dict[int, Entry]:
    """Return the gates and ups of each expert in one; without the experts that lack either."""
    return {
        number: ComposedWeight((gate, ups[number]), "alternating")
        for number, gate in gates.items()
        if number in ups and ups[number].shape == gate.shape
    }


def _bias(block: str, matrix: str, bias: Entry, weights: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the biases of all experts that MLX's ``bias`` belongs to; those of ups come with those of gates."""
    if matrix == _UP:
        return {}
    up = weights.get(f"{block}.{_UP}.bias")
    if matrix == _GATE and up is not None and up.shape == bias.shape:
        return {f"{block}.{_JOINED[_GATE]}_bias": ComposedWeight((bias, up), "alternating")}
    return {f"{block}.{matrix}_bias": bias}
