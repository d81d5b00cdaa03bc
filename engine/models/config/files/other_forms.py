"""what_to_give: the remedy for a directory that holds a model in a form that is not read."""

from __future__ import annotations

from pathlib import Path

__all__ = ["what_to_give"]

_HUGGING_FACE = "give the checkpoint with config.json and model.safetensors"

# Patterns of files, and what to do if there is one; the first that matches counts.
_FORMS = (
    ("*.gguf", "give the path of a GGUF file itself, such as '{path}'"),
    ("params.json", f"{{name}} is of Mistral's or Meta's own format: {_HUGGING_FACE}, which is published beside it"),
    ("consolidated*", f"{{name}} is of Mistral's or Meta's own format: {_HUGGING_FACE}, which is published beside it"),
    ("adapter_config.json", "{name} is of an adapter, which is not a model: merge it into its base model"),
    ("model_index.json", "{name} is of a diffusion pipeline: give a language model"),
    ("*.nemo", f"{{name}} is of NeMo: {_HUGGING_FACE}"),
    ("*.onnx", f"{{name}} is compiled for ONNX: {_HUGGING_FACE}"),
    ("openvino_model.xml", f"{{name}} is compiled for OpenVINO: {_HUGGING_FACE}"),
    *(
        (pattern, "{name} is pickled, which can run code: convert it to safetensors")
        for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt")
    ),
    *((pattern, f"{{name}} is not in safetensors: {_HUGGING_FACE}") for pattern in ("*.npz", "*.h5", "*.msgpack")),
)


def what_to_give(directory: Path) -> str:
    """Return what to give instead of ``directory``, which lacks a file of a Hugging Face checkpoint."""
    for pattern, remedy in _FORMS:
        if files := sorted(directory.glob(pattern)):
            return remedy.format(path=files[0], name=files[0].name)
    return "give the path of a Hugging Face checkpoint"
