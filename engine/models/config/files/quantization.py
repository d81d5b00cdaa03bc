"""Quantization: what the files of a checkpoint say about the format of its weights, read without torch.

checkpoint/formats/ reads the weights. It finds quantised ones by the names and dtypes of their tensors, so the lists of
layers in these configs are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError, listed, shown
from engine.models.config.files.json_file import read_json

__all__ = ["METHODS", "Quantization", "read_quantization", "without_quantization"]

# Names of methods in config files, and what they are here. Programs that serve them have further names, in which "_"
# and "-" are the same.
METHODS = {
    "fp8": "fp8",
    "fbgemm-fp8": "fp8",
    "mxfp8": "fp8",
    "w8a8-fp8": "fp8",
    "w8a8-int8": "int8",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "modelopt",
    "modelopt-fp8": "modelopt",
    "modelopt-fp4": "modelopt",
    "modelopt-mxfp8": "modelopt",
    "modelopt-mixed": "modelopt",
    "quark": "quark",
    "mxfp4": "mxfp4",
    "awq": "awq",
    "gptq": "gptq",
    "auto-round": "auto-round",
    "intel/auto-round": "auto-round",
    "bitsandbytes": "bitsandbytes",
    "mlx": "mlx",
}
# Fields that say how weights are stored, and the values of them that can be read.
_LAYOUTS: dict[str, dict[str, tuple[str | int, ...]]] = {
    "awq": {"version": ("gemm",), "format": ("gemm",), "bits": (4,)},
    "gptq": {
        "checkpoint_format": ("gptq", "gptq_v2"),
        "format": ("gptq", "gptq_v2"),
        "is_marlin_format": (False,),
        "bits": (2, 3, 4, 8),
    },
    "auto-round": {"bits": (2, 3, 4, 8)},
    "compressed-tensors": {
        "format": (
            "pack-quantized",
            "int-quantized",
            "naive-quantized",
            "float-quantized",
            "nvfp4-pack-quantized",
            "mxfp4-pack-quantized",
            "mxfp8-quantized",
            "mixed-precision",
            "dense",
        ),
    },
}
_FIELDS = ("quantization_config", "compression_config", "quantization")  # the last one is MLX's
_MODELOPT_FILE = "hf_quant_config.json"
_REMEDY = "give the checkpoint in bf16, fp16 or fp32, or in one of the formats that docs/models.md lists"


@dataclass(frozen=True)
class Quantization:
    """What a checkpoint says about the format of its weights.

    Attributes:
        method: one of ``METHODS``' values; None: no file says that the weights are quantised.
        fields: of the method, as they are written.
        file: that has them, for messages.
    """

    method: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    file: Path = Path()

    @property
    def quantises_activations(self) -> bool:
        """Whether the inputs of FP8 weights are quantised to FP8 in each step, with scales that follow from them."""
        match self.method:
            case "compressed-tensors":
                return _are_dynamic(self.fields.get("config_groups"))
            case "modelopt":
                return self.fields.get("quant_algo") == "FP8_PER_CHANNEL_PER_TOKEN"
            case "fp8":
                name = str(self.fields.get("quant_method")).lower().replace("-", "_")
                return name == "fbgemm_fp8" or self.fields.get("activation_scheme") == "dynamic"
        return False

    def error(self, problem: str) -> ModelLoadError:
        """Return the error about a field."""
        return ModelLoadError(f"the quantization in '{self.file}' {problem}; {_REMEDY}")


def read_quantization(directory: Path, raw: Mapping[str, Any]) -> Quantization:
    """Return what config.json says, or else the file that ModelOpt writes beside it.

    Args:
        directory: of the checkpoint.
        raw: the fields of its config.json.

    Raises:
        ModelLoadError: if a file is malformed, or the method is not one that can be read.
    """
    file = directory / "config.json"
    text = raw.get("text_config")
    for fields in (raw, text if isinstance(text, Mapping) else {}):
        for name in _FIELDS:
            if value := fields.get(name):
                return _checked(value, file, name)
    file = directory / _MODELOPT_FILE
    if not file.is_file():
        return Quantization()
    try:
        value = read_json(file).get("quantization")
    except OSError as error:
        raise ModelLoadError(f"'{file}' could not be read: {error}") from error
    return _checked({"quant_method": "modelopt"} | value if isinstance(value, dict) else value, file, "quantization")


def _checked(fields: object, file: Path, name: str) -> Quantization:
    if not isinstance(fields, dict):
        raise ModelLoadError(f"{name}={shown(fields)} of '{file}' is not an object; correct it, or download it again")
    method = fields.get("quant_method")
    if method is None and ("quant_algo" in fields or "producer" in fields):
        method = "modelopt"
    elif method is None and {"bits", "group_size"} <= fields.keys():
        method = "mlx"
    known_as = method.lower().replace("_", "-") if isinstance(method, str) else ""
    if known_as not in METHODS:
        raise ModelLoadError(
            f"'{file.parent}' is quantised ({'unknown' if method is None else method}), which is not supported; "
            f"{_REMEDY}"
        )
    quantization = Quantization(METHODS[known_as], fields, file)
    for key, known in _LAYOUTS.get(METHODS[known_as], {}).items():
        value = fields.get(key)
        if value is not None and (value.lower() if isinstance(value, str) else value) not in known:
            raise quantization.error(f"has {key}={shown(value)}, and only {listed(known)} can be read")
    transforms = fields.get("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        raise quantization.error("has a transform_config: weights and activations are rotated, which is not computed")
    sparsity = fields.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise quantization.error(f"has a sparsity_config with the format {shown(sparsity['format'])}, not 'dense'")
    return quantization


def _are_dynamic(groups: object) -> bool:
    """Whether all groups of compressed-tensors whose weights are FP8 have activations in FP8, by token or by 128."""
    schemes = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    inputs = [group.get("input_activations") for group in schemes if _is_fp8(group.get("weights"))]
    return bool(inputs) and all(
        isinstance(scheme, dict) and _is_fp8(scheme) and bool(scheme.get("dynamic")) for scheme in inputs
    )


def _is_fp8(scheme: Any) -> bool:
    return isinstance(scheme, dict) and scheme.get("type") == "float" and scheme.get("num_bits") == 8


def without_quantization(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json without those about quantisation, which weights that are read do not have."""
    kept = {name: value for name, value in raw.items() if name not in _FIELDS}
    if isinstance(text := raw.get("text_config"), dict):
        kept["text_config"] = without_quantization(text)
    return kept
