"""stored_parts: the stored tensors that make up one parameter of our decoder, and what each contributes.

A parameter of ours is one tensor of the checkpoint or several concatenated ones (fused projections). Families have
other names, other orders of rows, and factors that are multiplied into the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from engine.models.checkpoint.checkpoint import Checkpoint
from engine.models.checkpoint.expert_weights import expert_parts, stored_block
from engine.models.checkpoint.sharding import Shard, layer_of, shard_of
from engine.models.config.families.stored_names import stored_name
from engine.models.config.model_config import ModelConfig
from engine.models.config.shapes.mixers import RecurrentShape
from engine.models.config.shapes.recurrent.gated_delta import GatedDeltaShape
from engine.models.config.shapes.recurrent.kimi_delta import KimiDeltaShape
from engine.models.config.shapes.recurrent.short_conv import ConvShape

__all__ = [
    "EMBEDDING",
    "HEAD",
    "LAYER_EMBEDDING",
    "Part",
    "have_factors",
    "stored_parts",
    "stored_with_prefix",
    "unread",
]

EMBEDDING, NORM, HEAD = "embed_tokens.weight", "norm.weight", "lm_head.weight"
LAYER_EMBEDDING = "per_layer_inputs.embed_tokens_per_layer.weight"
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_LATENT = "qkv_a_proj"  # of latent attention
_OF_INDEX = ("wq_b", "wk", "k_norm")  # of the indexer of latent attention
_ROTATED = ("q_proj", "k_proj", "q_norm", "k_norm", "q_b_proj", "kv_a_proj_with_mqa", "wq_b", "wk")
_KEYS_AND_VALUES = ("k_proj", "v_proj", "k_norm", "v_norm")
_BY_HEAD = ("A_log", "dt_bias", "D")  # of recurrent layers


@dataclass(frozen=True, slots=True)
class Part:
    """What a stored tensor contributes to a parameter.

    Attributes:
        name: the tensor's.
        shard: this rank's part of it; None: all of it.
        order: returns the stored index of each row, of groups of as many rows; None: they are in order. It is called
            when the tensor is read, because an index of each row would take memory for sizes that are not checked yet.
        scale: factor of the stored numbers.
    """

    name: str
    shard: Shard | None
    order: Callable[[], list[int]] | None = None
    scale: float = 1.0

    @property
    def is_as_stored(self) -> bool:
        """Whether the numbers are in the order in which they are stored, and the same."""
        return self.order is None and self.scale == 1.0


def have_factors(parts: Iterable[Part]) -> bool:
    """Return whether the stored numbers of some of a parameter's parts are multiplied."""
    return any(part.scale != 1.0 for part in parts)


def stored_with_prefix(name: str, checkpoint: Checkpoint, config: ModelConfig) -> str:
    """Return the checkpoint's name of our parameter ``name``, which is not fused."""
    return _prefix(checkpoint, config) + stored_name(name, config.family.stored_names)


def _prefix(checkpoint: Checkpoint, config: ModelConfig) -> str:
    # By the norm, which every checkpoint has: of tied weights only the head may be stored, without a prefix.
    # A checkpoint of the model without its head, as of Qwen3's embeddings, has none at all.
    prefixes, norm = config.family.prefixes, stored_name(NORM, config.family.stored_names)
    return next((prefix for prefix in (*prefixes, "") if prefix + norm in checkpoint), prefixes[0])


def stored_parts(name: str, checkpoint: Checkpoint, config: ModelConfig, rank: int, size: int) -> list[Part]:
    """Return what makes up our parameter ``name``, in the order of its rows; nothing: its numbers are 1.

    Args:
        name: as our decoder has it; of experts, as ``unstack`` yields it.
        checkpoint: which may store one tensor under one of several names.
        config: of the whole model.
        rank: whose part is read, of ``size`` ranks.
    """
    if ".experts." in name:
        experts = expert_parts(name, checkpoint, config, _prefix(checkpoint, config), rank, size)
        return [Part(*part) for part in experts]
    if config.qk_norm == "unit" and name.endswith((".q_norm.weight", ".k_norm.weight")):
        return []
    if name == HEAD and not config.tie_word_embeddings:
        return [Part(HEAD, shard_of(HEAD, config, rank, size))]
    if config.tie_word_embeddings and name in (EMBEDDING, HEAD):  # some checkpoints store the one, some the other
        embedding = stored_with_prefix(EMBEDDING, checkpoint, config)
        stored = embedding if embedding in checkpoint or HEAD not in checkpoint else HEAD
        return [Part(stored, shard_of(EMBEDDING, config, rank, size))]
    if ".recurrent." in name and config.recurrent is not None:
        return _recurrent_parts(name, checkpoint, config, config.recurrent, rank, size)
    parts = [_plain_part(part, checkpoint, config, rank, size) for part in _unfused(name, config)]
    for fused in _FUSED.keys() & config.family.fused:
        if fused in name:
            shards = _within_fused([part.shard for part in parts])
            whole = stored_with_prefix(name, checkpoint, config)
            parts = [replace(part, name=whole, shard=shard) for part, shard in zip(parts, shards, strict=True)]
    return parts


def _unfused(name: str, config: ModelConfig) -> list[str]:
    if _LATENT in name and config.latent is not None:
        query = "q_proj" if config.latent.query_rank is None else "q_a_proj"
        return [name.replace(_LATENT, module) for module in (query, "kv_a_proj_with_mqa")]
    for fused, modules in _FUSED.items():
        if fused in name:
            if fused == "qkv_proj" and layer_of(name) in config.layer_heads.shared:
                modules = modules[:1]
            return [name.replace(fused, module) for module in modules]
    return [name]


def unread(name: str, checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Return whether a stored tensor is of a part of the model that is not computed.

    That is what the family ignores, layers that predict further tokens, and the keys and values of layers that read
    those of others.
    """
    later = (f"layers.{config.num_layers + index}." for index in range(config.num_mtp_layers))
    ignored = [config.family.ignored or "", *(_prefix(checkpoint, config) + layer for layer in later)]
    if name.startswith(tuple(filter(None, ignored))):
        return True
    shared = {
        f"layers.{layer}.self_attn.{module}" for layer in config.layer_heads.shared for module in _KEYS_AND_VALUES
    }
    return bool(shared) and name.removeprefix(_prefix(checkpoint, config)).rpartition(".")[0] in shared


def _plain_part(name: str, checkpoint: Checkpoint, config: ModelConfig, rank: int, size: int) -> Part:
    """Return the part that is a projection, a norm or the like, by our name for it."""
    module, kind = name.split(".")[-2:]
    shard = shard_of(name, config, rank, size)
    layer = layer_of(name)
    elements = _element_order(module, config, layer) if module in _ROTATED else None
    order: Callable[[], list[int]] | None = None if elements is None else partial(list, elements)
    if module == "q_proj" and config.gates_attention:
        order = partial(_queries_after_gates, config.num_heads // size, config.kv_heads(layer).dim, elements)
    if module == "v_proj" and layer in config.layer_heads.values_are_keys:  # projected twice, to save kernels
        name = name.replace("v_proj", "k_proj")
    stored = stored_block(stored_with_prefix(name, checkpoint, config), checkpoint)
    return Part(stored, shard, order, config.weight_scales.of(module, kind))


def _element_order(module: str, config: ModelConfig, layer: int) -> list[int] | None:
    """Return the stored index of each element of a head as the decoder has it; None: the order is the same."""
    latent = config.latent
    if latent is not None and module in _OF_INDEX:
        return None if latent.index is None else latent.index.element_order(latent.rope_dim)
    order = config.rope.element_order(config.kv_heads(layer).dim if latent is None else latent.rope_dim)
    if latent is None or order is None:
        return order
    first = latent.rank if module == "kv_a_proj_with_mqa" else latent.nope_dim  # elements that are not rotated
    return [*range(first), *(first + element for element in order)]


def _queries_after_gates(num_heads: int, head_dim: int, order: list[int] | None) -> list[int]:
    """Return the stored rows of all gates, then of all queries; stored is each head's query before its gate."""
    starts, elements = range(0, 2 * num_heads * head_dim, 2 * head_dim), order or list(range(head_dim))
    gates = [start + head_dim + element for start in starts for element in range(head_dim)]
    return gates + [start + element for start in starts for element in elements]


def _within_fused(shards: list[Shard | None]) -> list[Shard | None]:
    """Return the same parts of tensors that one fused tensor stores one after another."""
    within: list[Shard | None] = []
    full, start = sum(shard.full for shard in shards if shard is not None), 0
    for shard in shards:
        assert shard is not None  # fused projections are always sharded
        within.append(Shard(shard.dim, full, start + shard.start, start + shard.stop))
        start += shard.full
    return within


# --- recurrent layers -----------------------------------------------------------------------------------------------


def _recurrent_parts(
    name: str, checkpoint: Checkpoint, config: ModelConfig, shape: RecurrentShape, rank: int, size: int
) -> list[Part]:
    """Return the parts of a parameter of a recurrent layer."""
    *path, module, kind = name.split(".")
    stored = stored_with_prefix(name, checkpoint, config)
    match module:
        case "in_proj" if isinstance(shape, GatedDeltaShape):
            stored = stored_with_prefix(".".join(path), checkpoint, config)
            return _gated_delta_inputs(stored, shape, rank, size)
        case "in_proj" if isinstance(shape, KimiDeltaShape):
            stored = stored_with_prefix(".".join(path), checkpoint, config)
            return _kimi_delta_inputs(stored, shape, rank, size)
        case "in_proj":
            scales = [config.weight_scales.of_section(i, kind) for i in range(len(shape.in_sections))]
            return _sections(stored, shape.in_sections, rank, size, scales)
        case "conv" if _has_convolutions_apart(shape):
            module = stored_with_prefix(".".join(path), checkpoint, config)
            names = [f"{module}.{part}_conv1d.{kind}" for part in "qkv"]
            return _apart(names, shape.conv_sections, rank, size)
        case "conv":
            return _sections(stored, shape.conv_sections, rank, size)
        case "out_proj" if kind == "weight":
            shard = _share(shape.inner_size, rank, size, dim=1)
            return [Part(stored, shard, None, config.weight_scales.of(module, kind))]
        case "out_proj":
            return [Part(stored, None, None, config.weight_scales.of(module, kind))]
        case "gated_norm" if not isinstance(shape, GatedDeltaShape | KimiDeltaShape):
            return [Part(stored, _share(shape.inner_size, rank, size))]
        case "f_b_proj" | "g_b_proj":
            return [Part(stored, _share(shape.inner_size, rank, size))]
        case "recurrent" if isinstance(shape, KimiDeltaShape) and kind == "dt_bias":
            return [Part(stored, _share(shape.inner_size, rank, size))]
        case "recurrent" if kind in _BY_HEAD:
            assert not isinstance(shape, ConvShape)
            return [Part(stored, _share(shape.num_heads, rank, size))]
    return [Part(stored, None)]


def _has_convolutions_apart(shape: RecurrentShape) -> bool:
    return isinstance(shape, KimiDeltaShape) or (isinstance(shape, GatedDeltaShape) and shape.stored == "apart")


def _share(count: int, rank: int, size: int, dim: int = 0) -> Shard:
    own = count // size
    return Shard(dim, count, rank * own, (rank + 1) * own)


def _sections(
    stored: str, widths: tuple[int, ...], rank: int, size: int, scales: list[float] | None = None
) -> list[Part]:
    """Return a rank's rows of each section of one stored tensor."""
    full, parts = sum(widths), []
    for index, (start, width) in enumerate(zip(accumulate(widths, initial=0), widths, strict=False)):
        own = width // size
        shard = Shard(0, full, start + rank * own, start + (rank + 1) * own)
        parts.append(Part(stored, shard, None, 1.0 if scales is None else scales[index]))
    return parts


def _apart(names: list[str], widths: tuple[int, ...], rank: int, size: int) -> list[Part]:
    """Return a rank's rows of each section, which has a tensor of its own."""
    return [Part(name, _share(width, rank, size)) for name, width in zip(names, widths, strict=True)]


def _gated_delta_inputs(module: str, shape: GatedDeltaShape, rank: int, size: int) -> list[Part]:
    """Return the rows of queries, keys, values, gates, betas and decays, which two, four or six tensors store."""
    inner, heads = shape.inner_size, shape.num_heads
    if shape.stored == "apart":
        return _apart([f"{module}.{name}_proj.weight" for name in "qkvgba"], shape.in_sections, rank, size)
    if shape.stored == "qkv":
        parts = _sections(f"{module}.in_proj_qkv.weight", shape.conv_sections, rank, size)
        parts.append(Part(f"{module}.in_proj_z.weight", _share(inner, rank, size)))
        return parts + [Part(f"{module}.in_proj_{name}.weight", _share(heads, rank, size)) for name in "ba"]
    own_groups, per_group = shape.num_key_heads // size, heads // shape.num_key_heads
    values = per_group * shape.value_dim
    return [
        Part(
            f"{module}.{name}.weight",
            _share(sum(widths) * shape.num_key_heads, rank, size),
            partial(_by_section, own_groups, widths),
        )
        for name, widths in (
            ("in_proj_qkvz", (shape.key_dim, shape.key_dim, values, values)),
            ("in_proj_ba", (per_group, per_group)),
        )
    ]


def _kimi_delta_inputs(module: str, shape: KimiDeltaShape, rank: int, size: int) -> list[Part]:
    """Return the rows of queries, keys, values, betas, and what decays and gates are computed of, on every rank."""
    names, low_rank = [f"{module}.{name}_proj.weight" for name in "qkvb"], Shard(0, shape.head_dim, 0, shape.head_dim)
    parts = _apart(names, shape.in_sections[:4], rank, size)
    return parts + [Part(f"{module}.{name}_a_proj.weight", low_rank) for name in "fg"]


def _by_section(num_groups: int, widths: tuple[int, ...]) -> list[int]:
    """Return the stored rows of each section, of all groups; stored is one group of all sections after another."""
    starts = [(group * sum(widths)) for group in range(num_groups)]
    return [
        start + offset + row
        for offset, width in zip(accumulate(widths, initial=0), widths, strict=False)
        for start in starts
        for row in range(width)
    ]
