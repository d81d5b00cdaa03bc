"""Where a checkpoint stores the weights of experts: a tensor for each expert's matrix, or one for a layer's.

model.layers.0.mlp.experts.5.gate_proj.weight           Qwen's original checkpoints, and what transformers saves
model.layers.0.block_sparse_moe.experts.5.w1.weight     Mixtral's: w1 is the gate, w3 up, w2 down
model.layers.0.mlp.experts.gate_up_proj                 transformers' modules: [num_experts, gates then ups, inputs]

The same tensors have other names in other families, which config/families/stored_names.py translates.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from engine.models.checkpoint.sharding import Shard
from engine.models.config.families.stored_names import stored_name
from engine.models.config.model_config import ModelConfig

__all__ = ["expert_parts", "stored_block", "unstack"]

_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def unstack(shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, list[int]]]:
    """Yield names and shapes of parameters; of a stacked one, each expert's: ``layers.0.mlp.experts.5.down_proj``."""
    for name, shape in shapes.items():
        if len(shape) < 3 or ".experts." not in name:
            yield name, list(shape)
            continue
        module, _, matrix = name.rpartition(".")
        for expert in range(shape[0]):
            yield f"{module}.{expert}.{matrix}", list(shape[1:])


def stored_block(name: str, stored: Container[str]) -> str:
    """Return the stored name of a parameter that is not fused: Mixtral has another name for the block."""
    head, separator, tail = name.partition(".mlp.")
    mixtral = f"{head}.block_sparse_moe"
    return f"{mixtral}.{tail}" if separator and f"{mixtral}.gate.weight" in stored else name


def expert_parts(
    name: str, stored: Container[str], config: ModelConfig, prefix: str, rank: int, size: int
) -> list[tuple[str, Shard]]:
    """Return the stored tensors of one expert's matrix, and a rank's part of each.

    Args:
        name: as ``unstack`` yields it.
        stored: the names of the checkpoint's tensors.
        config: of the whole model, which has experts.
        prefix: of all names.
        rank: whose part is read, of ``size`` ranks.
    """
    block, _, rest = name.partition(".experts.")
    number, matrix = rest.split(".")
    shape, names = config.experts, config.family.stored_names
    assert shape is not None
    inner, own = shape.intermediate_size, shape.intermediate_size // size
    dim, start = (1 if matrix == "down_proj" else 0), rank * own
    parts = _MATRICES[matrix]
    stack = prefix + stored_name(f"{block}.experts.{matrix}", names)
    if stack in stored:
        return [
            (
                stack,
                Shard(
                    dim,
                    len(parts) * inner,
                    first + start,
                    first + start + own,
                    num_stacked=shape.num_experts,
                    index=int(number),
                ),
            )
            for first in range(0, len(parts) * inner, inner)
        ]
    module = stored_block(f"{prefix}{block}.experts.{number}", stored)
    if ".block_sparse_moe." in module:
        modules = [f"{module}.{_MIXTRAL[part]}" for part in parts]
    else:
        modules = [prefix + stored_name(f"{block}.experts.{number}.{part}", names) for part in parts]
    return [(f"{module}.weight", Shard(dim, inner, start, start + own)) for module in modules]
