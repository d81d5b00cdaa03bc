"""WeightScales: factors of projections and norms, which become a part of the weights when they are loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ModelLoadError, shown
from engine.models.config.values.limits import require_integer, require_number

__all__ = ["WeightScales"]


@dataclass(frozen=True)
class WeightScales:
    """Factors of the weights and of the biases of projections, by their names in a checkpoint of Llama's.

    Attributes:
        weights: what multiplies a projection's inputs and outputs.
        biases: what multiplies its outputs.
        sections: of the outputs of a Mamba layer's input projection; empty: 1 for all.
        section_inputs: of its inputs.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    biases: Mapping[str, float] = field(default_factory=dict)
    sections: tuple[float, ...] = ()
    section_inputs: float = 1.0

    def of(self, module: str, kind: str) -> float:
        """Return the factor of a projection's ``kind``, weight or bias."""
        return (self.weights if kind == "weight" else self.biases).get(module, 1.0)

    def of_section(self, section: int, kind: str) -> float:
        """Return the factor of a section of a Mamba layer's input projection."""
        scale = self.sections[section] if self.sections else 1.0
        return scale * self.section_inputs if kind == "weight" else scale

    @classmethod
    def from_hf(cls, config: Any) -> WeightScales:
        """Read a transformers config of Falcon-H1, or of Gemma 4 with experts; others have no factors.

        Raises:
            ModelLoadError: if a factor is not a finite number, or a list of them has another length.
        """
        if getattr(config, "enable_moe_block", False):
            return cls({"router_norm": require_integer(config, "hidden_size") ** -0.5})
        if not hasattr(config, "ssm_multipliers"):
            return cls()
        gate, down = _numbers(config, "mlp_multipliers", 2)
        outputs = {
            "k_proj": require_number(config, "key_multiplier"),
            "o_proj": require_number(config, "attention_out_multiplier"),
            "gate_proj": gate,
            "down_proj": down,
            "out_proj": require_number(config, "ssm_out_multiplier"),
        }
        inputs = dict.fromkeys(("q_proj", "k_proj", "v_proj"), require_number(config, "attention_in_multiplier"))
        weights = {name: inputs.get(name, 1.0) * outputs.get(name, 1.0) for name in inputs.keys() | outputs.keys()}
        sections = _numbers(config, "ssm_multipliers", 5)
        return cls(weights, outputs, sections, require_number(config, "ssm_in_multiplier"))


def _numbers(config: Any, name: str, count: int) -> tuple[float, ...]:
    numbers = getattr(config, name)
    is_list = isinstance(numbers, list | tuple) and len(numbers) == count
    if not is_list or not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        raise ModelLoadError(f"{name}={shown(numbers)} is not a list of {count} finite numbers; correct config.json")
    return tuple(map(float, numbers))
