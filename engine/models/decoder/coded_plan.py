"""plan_codes: which weights of a quantised checkpoint are computed from their codes, and in which formats.

It is decided before memory is allocated and weights are read. Every other weight is dequantised when it is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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
    """

    sections: Mapping[str, tuple[Section, ...]]
    stored: frozenset[str]

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
    is_head_embedding: bool,
    is_packed: bool = True,
    has_floats: bool = True,
) -> CodedPlan:
    """Return which weights stay codes.

    Args:
        shapes: of this rank's parameters that may stay codes, and maybe of others, by name.
        checkpoint: whose weights they are.
        config: of the whole model.
        parallel: the rank whose share is read.
        is_head_embedding: the embedding is read from the head's packed weights.
        is_packed: the C kernels compute them: formats change between panels only, and gate and up are interleaved.
        has_floats: the kernels compute codes that are floats: the C kernels in bfloat16 only.
    """
    found: dict[str, tuple[Section, ...] | None] = {}
    stored: dict[str, set[str]] = defaultdict(set)
    for name, shape in unstack({name: list(shape) for name, shape in shapes.items() if _is_linear(name)}):
        if name == HEAD and config.tie_word_embeddings:
            continue  # it is the embedding
        if name == EMBEDDING and not is_head_embedding:
            continue
        parts = stored_parts(name, checkpoint, config, parallel.rank, parallel.size)
        key, sections = _without_number(name), _sections(shape, parts, checkpoint)
        if sections is not None and not has_floats and any(section.format.floats for section in sections):
            sections = None
        if is_packed and sections is not None and not _fits_panels(name, sections):
            sections = None
        found[key] = sections if found.get(key, sections) == sections else None  # of all experts alike
        stored[key].update(part.name for part in parts)
    kept = {name: sections for name, sections in found.items() if sections is not None}
    return CodedPlan(kept, frozenset().union(*(stored[name] for name in kept)))


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


def _sections(shape: list[int], parts: Sequence[Part], checkpoint: Checkpoint) -> tuple[Section, ...] | None:
    """Return the formats of a parameter's outputs; None if it has to be dequantised."""
    sections: list[Section] = []
    has_factors = have_factors(parts)
    for part in parts:
        form = checkpoint.code_format(part.name, part.shard) if part.name in checkpoint else None
        if form is None:
            return None
        form = form.with_output_scales if has_factors else form
        is_share = part.shard is not None and part.shard.dim == 0
        count = part.shard.stop - part.shard.start if is_share and part.shard is not None else shape[0]
        if sections and sections[-1].format == form:
            count += sections.pop().num_outputs
        sections.append(Section(form, count))
    return tuple(sections) or None


def _fits_panels(name: str, sections: Sequence[Section]) -> bool:
    is_interleaved = "gate_up_proj" in name
    has_whole_panels = not any(section.num_outputs % SECTION_OUTPUTS for section in sections[:-1])
    has_one_kind = len({section.format.floats is None for section in sections}) == 1
    return has_whole_panels and has_one_kind and not (is_interleaved and len(sections) > 1)
