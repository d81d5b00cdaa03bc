"""ModuleTensors: the stored tensors of one module; each format takes those that it knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from engine.errors import ModelLoadError
from engine.models.checkpoint.files.safetensors_header import StoredTensor
from engine.models.config.files.quantization import Quantization

__all__ = ["ModuleTensors", "modules_of"]

# What belongs to a weight of any name: bitsandbytes' state.
_STATE = re.compile(r"(.*)\.((?:nested_)?(?:absmax|quant_map)|quant_state\.bitsandbytes__\w+)")


@dataclass
class ModuleTensors:
    """The tensors of one module.

    Attributes:
        name: of the module.
        tensors: that no format has taken, by the rest of their names.
        quantization: what the checkpoint says.
        read: returns the bytes of a tensor, for the small ones that decide about a weight's shape.
    """

    name: str
    tensors: dict[str, StoredTensor]
    quantization: Quantization
    read: Callable[[StoredTensor], bytes]

    def find(self, *names: str) -> str | None:
        """Return the first of the names that the module has."""
        return next((name for name in names if name in self.tensors), None)

    def take(self, **names: str | None) -> dict[str, StoredTensor]:
        """Remove tensors, by what they are for a weight, and return them; those that are None are left out."""
        return {part: self.tensors.pop(name) for part, name in names.items() if name is not None}

    def full_name(self, name: str) -> str:
        """Return the name of one of its tensors."""
        return f"{self.name}.{name}" if self.name else name

    def error(self, name: str, problem: str) -> ModelLoadError:
        """Return the error about one of its tensors."""
        return ModelLoadError(
            f"'{self.full_name(name)}' of '{self.tensors[name].path}' {problem}; download config.json and the file "
            "again, from one source"
        )


def modules_of(
    stored: Mapping[str, StoredTensor], quantization: Quantization, read: Callable[[StoredTensor], bytes]
) -> Iterator[ModuleTensors]:
    """Yield the modules that tensors belong to: ``a.b.weight`` and ``a.b.weight.absmax`` belong to ``a.b``."""
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        module, separator, state = name.partition(".weight.")
        if separator:
            rest = f"weight.{state}"
        elif (of_weight := _STATE.fullmatch(name)) and of_weight[1] in stored:
            module, _, rest = of_weight[1].rpartition(".")
            rest = f"{rest}.{of_weight[2]}"
        else:
            module, _, rest = name.rpartition(".")
        modules.setdefault(module, {})[rest] = tensor
    for module, tensors in modules.items():
        yield ModuleTensors(module, tensors, quantization, read)
