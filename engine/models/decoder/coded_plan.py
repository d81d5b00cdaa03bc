"""plan_codes: which weights of a quantised checkpoint are computed from their codes, and in which formats.

It is decided before memory is allocated and weights are read. Every other weight is dequantised when it is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from engine.models.checkpoint.checkpoint import Checkpoint
from engine.models.checkpoint.expert_weights import unstack
from engine.models.checkpoint.stored_parts import EMBEDDING, HEAD, Part, have_factors, stored_parts
from engine.models.config.model_config import ModelConfig
from engine.models.tensor_parallel import TensorParallel
from kernels.coded_weight import Section
from kernels.cpu.coded_linear import SECTION_OUTPUTS, format_at_load

__all__ = ["NO_CODES", "CodedPlan", "plan_codes", "plan_quantization"]

# By the name of a layer's parameter in decoder.py: the attribute of PackedLayer, PackedExperts and PackedRecurrent.
_OF_LAYER = {
    "self_attn.qkv_proj.weight": "qkv",
    "self_attn.qkv_a_proj.weight": "qkv",
    "self_attn.q_b_proj.weight": "query",
    "self_attn.o_proj.weight": "output",
    "mlp.gate_up_proj.weight": "gate_up",
    "mlp.up_proj.weight": "gate_up",
    "mlp.down_proj.weight": "down",
    "mlp.dense.gate_up_proj.weight": "gate_up",
    "mlp.dense.down_proj.weight": "down",
    "per_layer_input.gate.weight": "own_gate",
    "per_layer_input.projection.weight": "own_projection",
}
_OF_EXPERTS = {
    "experts.gate_up_proj": "gate_up",
    "experts.up_proj": "gate_up",
    "experts.down_proj": "down",
    "shared_expert.gate_up_proj.weight": "shared_gate_up",
    "shared_expert.up_proj.weight": "shared_gate_up",
    "shared_expert.down_proj.weight": "shared_down",
    "fc1_latent_proj.weight": "latent_in",
    "fc2_latent_proj.weight": "latent_out",
}
_OF_RECURRENT = {"recurrent.in_proj.weight": "input", "recurrent.out_proj.weight": "output"}
LayerPart = Literal["layer", "experts", "recurrent"]
_NAMES: dict[LayerPart, dict[str, str]] = {
    "layer": _OF_LAYER,
    "experts": {
        f"{block}.{name}": attribute for block in ("mlp", "mlp.sparse") for name, attribute in _OF_EXPERTS.items()
    },
    "recurrent": _OF_RECURRENT,
}


@dataclass(frozen=True)
class CodedPlan:
    """Which weights stay codes.

    Attributes:
        sections: their formats, by the names of our decoder's parameters, those of experts without their number.
        stored: the names of the stored weights whose codes they are; others are quantized while they are loaded.
        reasons: why others are dequantised, by their stored names, as far as there is a particular reason.
    """

    sections: Mapping[str, tuple[Section, ...]]
    stored: frozenset[str]
    reasons: Mapping[str, str] = field(default_factory=dict)

    def of_layer(self, layer: int, part: LayerPart) -> Mapping[str, tuple[Section, ...]]:
        """Return the formats of a part of a layer, by the names of its attributes."""
        names = {f"layers.{layer}.{name}": attribute for name, attribute in _NAMES[part].items()}
        return {attribute: self.sections[name] for name, attribute in names.items() if name in self.sections}

    def has(self, name: str) -> bool:
        """Return whether the stored codes of a parameter are kept; experts have their numbers."""
        return bool(self.stored) and _without_number(name) in self.sections


NO_CODES = CodedPlan({}, frozenset())


def plan_codes(
    shapes: Mapping[str, Iterable[int]],
    checkpoint: Checkpoint,
    config: ModelConfig,
    parallel: TensorParallel,
    *,
    is_embedding_coded: bool,
    is_packed: bool = True,
    has_floats: bool = True,
) -> CodedPlan:
    """Return which weights stay codes.

    Args:
        shapes: of this rank's parameters that may stay codes, and maybe of others, by name.
        checkpoint: whose weights they are.
        config: of the whole model.
        parallel: the rank whose share is read.
        is_embedding_coded: the embedding's rows are looked up in codes: of the head's packed weights, or on a GPU.
        is_packed: the C kernels compute them: formats change between panels only, and gate and up are interleaved. In
            experts these have one format on GPUs, too.
        has_floats: the kernels compute codes that are floats: the C kernels in bfloat16 only.
    """
    choices: dict[str, tuple[Section, ...] | str] = {}
    stored: dict[str, set[str]] = defaultdict(set)
    for name, shape in unstack({name: list(shape) for name, shape in shapes.items() if _is_linear(name)}):
        if name == HEAD and config.tie_word_embeddings:
            continue  # it is the embedding
        if name == EMBEDDING and not is_embedding_coded:
            continue
        parts = stored_parts(name, checkpoint, config, parallel.rank, parallel.size)
        key, sections = _without_number(name), _sections_or_reason(shape, parts, checkpoint)
        if not isinstance(sections, str):
            reason = _why_not_computed(name, sections, is_packed=is_packed, has_floats=has_floats)
            sections = reason or sections
        if choices.get(key, sections) != sections:
            sections = choices[key] if isinstance(choices[key], str) else "experts of a layer are in several formats"
        choices[key] = sections
        stored[key].update(part.name for part in parts)
    kept = {name: sections for name, sections in choices.items() if not isinstance(sections, str)}
    reasons = {part: reason for name, reason in choices.items() if isinstance(reason, str) for part in stored[name]}
    return CodedPlan(kept, frozenset().union(*(stored[name] for name in kept)), reasons)


def plan_quantization(
    shapes: Mapping[str, Iterable[int]], bits: int, head_bits: int, *, is_head_embedding: bool
) -> CodedPlan:
    """Return the plan that quantizes all linear layers while they are loaded.

    Args:
        shapes: of this rank's parameters, by name.
        bits: of codes.
        head_bits: of the head's codes.
        is_head_embedding: the embedding is read from the head's packed weights.
    """
    head = EMBEDDING if is_head_embedding else HEAD
    sections = {}
    for name, shape in shapes.items():
        if _is_linear(name) and name not in {EMBEDDING, HEAD} - {head}:
            num_outputs = list(shape)[-2]
            sections[name] = (Section(format_at_load(head_bits if name == head else bits), num_outputs),)
    return CodedPlan(sections, frozenset())


def _without_number(name: str) -> str:
    block, is_expert, rest = name.partition(".experts.")
    return f"{block}{is_expert}{rest.rpartition('.')[2]}" if is_expert else name


def _is_linear(name: str) -> bool:
    if name in (EMBEDDING, HEAD):
        return True
    first, _, rest = name.partition(".")
    own = rest.partition(".")[2]
    return first == "layers" and any(own in names for names in _NAMES.values())


def _sections_or_reason(shape: list[int], parts: Sequence[Part], checkpoint: Checkpoint) -> tuple[Section, ...] | str:
    """Return the formats of a parameter's outputs, or why it has to be dequantised."""
    sections: list[Section] = []
    has_factors = have_factors(parts)
    for part in parts:
        if part.name not in checkpoint:
            return "they are not stored"  # which is reported when they are read
        form = checkpoint.code_format(part.name, part.shard)
        if form is None:
            return checkpoint.why_not_coded(part.name, part.shard)
        form = form.with_output_scales if has_factors else form
        is_share = part.shard is not None and part.shard.dim == 0
        count = part.shard.stop - part.shard.start if is_share and part.shard is not None else shape[0]
        if sections and sections[-1].format == form:
            count += sections.pop().num_outputs
        sections.append(Section(form, count))
    orders = [checkpoint.input_order(part.name) for part in parts]
    if not all(_are_equal(order, orders[0]) for order in orders):
        return "projections that are computed together have their inputs in different orders"
    return tuple(sections) or "they are not stored"


def _are_equal(order: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if order is None or other is None:
        return order is other
    return torch.equal(order, other)


def _why_not_computed(name: str, sections: Sequence[Section], *, is_packed: bool, has_floats: bool) -> str | None:
    """Return why a parameter with these formats has to be dequantised; None if it can be computed from its codes."""
    formats = [section.format for section in sections]
    if not has_floats and any(form.floats for form in formats):
        return "FP8 is computed from its codes with dtype bfloat16"
    if any(form.has_input_order for form in formats) and (".experts." in name or "latent_proj" in name):
        return "experts read their inputs in order"
    if name == EMBEDDING and any(form.has_input_order for form in formats) and not is_packed:
        return "embeddings have their inputs in order"
    if "gate_up_proj" in name and len(sections) > 1 and (is_packed or ".experts." in name):
        return "gates and ups are in different formats"
    if not is_packed:
        return None
    if any(section.num_outputs % SECTION_OUTPUTS for section in sections[:-1]):
        return f"projections in different formats do not have multiples of {SECTION_OUTPUTS} outputs"
    if len({form.floats is None for form in formats}) > 1:
        return "only some of the projections that are computed together are floats"
    return None
