"""Checkpoint: the weights of a directory of safetensors files, single or sharded, read one at a time.

Of a multimodal checkpoint it has the tensors of the text part, by the names of a model of text.

Only safetensors are read: pickled weights can run code when they are loaded. What the headers of the files and the
index say is checked when the checkpoint is opened, before any weight is read. A quantised weight, which several stored
tensors may hold, is dequantised when it is read.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import torch

from engine.errors import ModelLoadError, listed
from engine.models.checkpoint.composed_weight import ComposedWeight, Entry, read_composed, tensors_of, weights_of
from engine.models.checkpoint.files.chosen_files import chosen_file
from engine.models.checkpoint.files.safetensors_header import StoredTensor
from engine.models.checkpoint.files.shard_index import join_shards, read_index
from engine.models.checkpoint.files.tensor_files import TensorFiles
from engine.models.checkpoint.formats.coded_reading import code_format_of, read_coded, why_not_coded
from engine.models.checkpoint.formats.gguf import gguf_entries
from engine.models.checkpoint.formats.table import group_weights
from engine.models.checkpoint.gpt_oss_experts import with_stacked_experts
from engine.models.checkpoint.kv_scales import StoredKVScales
from engine.models.checkpoint.mlx_layout import with_joined_latents, with_mlx_layout
from engine.models.checkpoint.own_memory import own_memory
from engine.models.checkpoint.packed_weight import PackedWeight, Scratch, read_packed
from engine.models.checkpoint.plain_tensor import PLAIN_DTYPES, read_plain
from engine.models.checkpoint.sharding import Shard
from engine.models.checkpoint.text_part import architecture_of, text_tensors, with_experts_turned
from engine.models.config.files.json_file import read_json
from engine.models.config.files.own_code import as_known_text
from engine.models.config.files.quantization import read_quantization
from engine.models.gguf.file import is_gguf, open_gguf
from kernels.coded_weight import CodedMatrix, CodeFormat

__all__ = ["Checkpoint", "open_checkpoint"]

_INTEGERS = {"I64": torch.int64, "I32": torch.int32}

logger = logging.getLogger(__name__)


class Checkpoint:
    """Names and weights of an open checkpoint. Several threads may read from it at once.

    Args:
        path: the directory or the GGUF file, for messages.
        stored: where each weight is stored, by its name.
        files: the open files.

    Attributes:
        kv_scales: the scales of keys and values.
        description: what says which weights there are, for messages: config.json, or a GGUF file's metadata.
        remedy: what to do if it is wrong.
    """

    def __init__(
        self, path: Path, stored: dict[str, Entry], files: TensorFiles, kv_scales: StoredKVScales | None = None
    ) -> None:
        self.path = path
        self._stored = stored
        self._files = files
        self._scratch = Scratch()
        self.kv_scales = kv_scales or StoredKVScales({}, files)
        self.description, self.remedy = "config.json", "download config.json and the weights again, from one source"
        if is_gguf(path):
            self.description, self.remedy = "metadata", "download the file again"

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    @property
    def names(self) -> list[str]:
        """Names of all the tensors, sorted."""
        return sorted(self._stored)

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._stored[name].path

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._stored[name].shape

    def dtype_of(self, name: str) -> torch.dtype:
        """Return a tensor's dtype, which is a floating-point one; that of a quantised weight's values is float32."""
        stored = self._stored[name]
        return PLAIN_DTYPES[stored.dtype] if isinstance(stored, StoredTensor) else torch.float32

    def is_packed(self, name: str) -> bool:
        """Return whether a weight is stored in a quantised format, or in several tensors, and put together if read."""
        return not isinstance(self._stored[name], StoredTensor)

    def has_floats(self, name: str) -> bool:
        """Return whether a weight has floating-point numbers that can be read."""
        return _unread_dtype(self._stored[name]) is None

    @property
    def main_dtype(self) -> torch.dtype:
        """The floating-point dtype that most of the stored bytes have; float32 if there is none."""
        num_bytes: Counter[torch.dtype] = Counter()
        for weight in chain.from_iterable(weights_of(stored) for stored in self._stored.values()):
            if isinstance(weight, StoredTensor) and weight.dtype in PLAIN_DTYPES:
                num_bytes[PLAIN_DTYPES[weight.dtype]] += weight.stop - weight.start
        return max(num_bytes, key=num_bytes.__getitem__, default=torch.float32)

    @property
    def largest_file_bytes(self) -> int:
        """Size of the largest file."""
        return max((tensor.stop for stored in self._stored.values() for tensor in tensors_of(stored)), default=0)

    def log_quantised(
        self,
        dtype: torch.dtype,
        coded: Collection[str] = (),
        reasons: Mapping[str, str] = MappingProxyType({}),
        why: str = "",
    ) -> None:
        """Log which weights in quantised formats are computed from their codes, and which are dequantised, and why.

        Args:
            dtype: that they are dequantised to.
            coded: the names of those that stay codes.
            reasons: why others are dequantised, by name.
            why: why those without a reason of their own are dequantised; empty: that is not said.
        """
        kept: list[PackedWeight] = []
        dequantised: dict[str, list[PackedWeight]] = defaultdict(list)
        for name, stored in self._stored.items():
            own = [weight for weight in weights_of(stored) if isinstance(weight, PackedWeight)]
            if own:
                (kept if name in coded else dequantised[reasons.get(name, why)]).extend(own)
        if kept:
            logger.info(
                "%d weights (%s) are computed from their codes: %.2f GB",
                len(kept),
                _formats(kept),
                sum(stored.num_bytes for stored in kept) / 1e9,
            )
        for reason, others in dequantised.items():
            logger.info(
                "%d weights (%s) are dequantised to %s%s: %.2f GB in the files, %.2f GB in memory",
                len(others),
                _formats(others),
                str(dtype).removeprefix("torch."),
                f", because {reason}" if reason else "",
                sum(stored.num_bytes for stored in others) / 1e9,
                sum(math.prod(stored.shape) for stored in others) * dtype.itemsize / 1e9,
            )

    def require(self, name: str, shape: list[int]) -> None:
        """Check a tensor's name, shape and dtype in the file's header; read nothing else.

        Raises:
            ModelLoadError: if the checkpoint lacks the tensor or stores another shape, or no floating-point numbers.
        """
        if name not in self._stored:
            raise _missing(self, name)
        self.require_floats(name)
        stored = self._stored[name]
        if list(stored.shape) != shape:
            raise ModelLoadError(
                f"'{name}' of '{stored.path}' has shape {list(stored.shape)}, but its {self.description} says {shape}; "
                f"{self.remedy}"
            )

    def require_floats(self, name: str) -> None:
        """Raise ModelLoadError unless a tensor has floating-point numbers of a type that can be read."""
        if (dtype := _unread_dtype(self._stored[name])) is not None:
            raise ModelLoadError(
                f"'{name}' of '{self.file_of(name)}' has the dtype {dtype}, and with the tensors beside it is not a "
                "weight of a known format; give the checkpoint in bf16, fp16 or fp32, or in one of the formats that "
                "docs/models.md lists"
            )

    def read(self, name: str, shard: Shard | None = None) -> torch.Tensor:
        """Return one tensor, or only the ``shard`` of it, on the CPU and in the checkpoint's own dtype.

        It is a view of the mapped file and may outlive the checkpoint. Only the parts that are touched are read. A
        quantised weight is not a view: it is dequantised to float32.
        """
        stored = self._stored[name]
        if not isinstance(stored, StoredTensor):
            shape = list(stored.shape if shard is None or shard.num_stacked is None else stored.shape[1:])
            if shard is not None:
                shape[shard.dim] = shard.stop - shard.start
            values = own_memory(tuple(shape), torch.float32)
            self.read_into(values, name, shard)
            return values
        dtype = PLAIN_DTYPES[stored.dtype]
        with _named(name, self._stored[name].path):
            memory = self._files.map(stored)
        if stored.start % dtype.itemsize:  # torch and C want aligned numbers
            memory = memory.clone()
        if stored.is_transposed:
            *stacked, num_rows, num_columns = stored.shape
            tensor = memory.view(dtype).view(*stacked, num_columns, num_rows).mT
        else:
            tensor = memory.view(dtype).view(stored.shape)
        if shard is None or shard.is_whole:
            return tensor
        if shard.num_stacked is not None:
            tensor = tensor[shard.index]
        return tensor.narrow(shard.dim, shard.start, shard.stop - shard.start)

    def read_integers(self, name: str, shape: list[int]) -> torch.Tensor:
        """Return a tensor of integers, which is not a weight, as int64.

        Raises:
            ModelLoadError: if it has another shape, or no integers of 32 or 64 bits, or the file cannot be read.
        """
        stored = self._stored[name]
        dtype = _INTEGERS.get(stored.dtype) if isinstance(stored, StoredTensor) else None
        if not isinstance(stored, StoredTensor) or dtype is None or list(stored.shape) != shape:
            kind = stored.dtype if isinstance(stored, StoredTensor) else "quantised"
            raise ModelLoadError(
                f"'{name}' of '{self.file_of(name)}' is {kind} of the shape {list(stored.shape)}, and integers of the "
                f"shape {shape} are expected; {self.remedy}"
            )
        with _named(name, stored.path):
            return self._files.map(stored).clone().view(dtype).view(shape).long()

    def read_into(self, out: torch.Tensor, name: str, shard: Shard | None = None) -> bool:
        """Fill ``out``, contiguous and on any device, with a tensor or a ``shard`` of it, converted to its dtype.

        Returns:
            Whether all numbers are known to be finite: of those that are not dequantised nothing is known.

        Raises:
            ModelLoadError: if a file cannot be read to the end of the tensor, or a quantised weight has invalid parts.
        """
        with _named(name, self._stored[name].path):
            return self._read_entry(out, self._stored[name], shard)

    def code_format(self, name: str, shard: Shard | None = None) -> CodeFormat | None:
        """Return how the codes of a quantised weight, or of a ``shard`` of it, are kept; None if they cannot be."""
        return code_format_of(self._stored[name], shard)

    def why_not_coded(self, name: str, shard: Shard | None = None) -> str:
        """Return why a weight, or a ``shard`` of it, has no ``code_format``, as the log says it of several."""
        return why_not_coded(self._stored[name], shard)

    def input_order(self, name: str) -> torch.Tensor | None:
        """Return the input that each column of a weight's codes multiplies; None: they are in order."""
        stored = self._stored[name]
        return stored.input_order if isinstance(stored, PackedWeight) else None

    def read_coded(self, name: str, shard: Shard | None = None) -> CodedMatrix:
        """Return a quantised weight of two dimensions that has a ``code_format``, or a ``shard`` of it, as codes.

        Raises:
            ModelLoadError: if a file cannot be read, or a scale is not finite.
        """
        with _named(name, self._stored[name].path):
            return read_coded(self._files, self._stored[name], shard, self._scratch)

    def _read_entry(self, out: torch.Tensor, stored: Entry, shard: Shard | None) -> bool:
        if isinstance(stored, PackedWeight):
            return read_packed(self._files, stored, out, shard, self._scratch)
        if isinstance(stored, ComposedWeight):
            read_composed(self._read_entry, stored, out, shard)
        else:
            read_plain(self._files, stored, out, shard)
        return False

    # --- reading ahead ------------------------------------------------------------------------------------------

    def expect(self, names: Iterable[str]) -> None:
        """Set the order in which tensors will be read, so that the disk reads ahead."""
        self._files.expect(tensor for name in names for tensor in tensors_of(self._stored[name]))

    def reached(self, name: str) -> None:
        """Have the disk read the tensors that follow ``name``, which is read now."""
        for tensor in tensors_of(self._stored[name]):
            self._files.reached(tensor)


@contextmanager
def _named(name: str, path: Path) -> Iterator[None]:
    """Name the tensor and its file where reading fails."""
    try:
        yield
    except OSError as error:
        raise ModelLoadError(f"'{name}' of '{path}' could not be read: {error}") from error


def _formats(weights: Iterable[PackedWeight]) -> str:
    return ", ".join(sorted({stored.format for stored in weights}))


def _unread_dtype(stored: Entry) -> str | None:
    """Return the dtype of a tensor that is not of numbers that can be read; None if there is none."""
    plain = (weight for weight in weights_of(stored) if isinstance(weight, StoredTensor))
    return next((tensor.dtype for tensor in plain if tensor.dtype not in PLAIN_DTYPES), None)


def _missing(checkpoint: Checkpoint, name: str) -> ModelLoadError:
    """Return the error about a tensor that config.json asks for."""
    module = name.removesuffix("weight")
    beside = [other for other in checkpoint.names if other.startswith(module)] if module != name else []
    where = f", but '{checkpoint.file_of(beside[0])}' has {listed(beside)}" if beside else ""
    return ModelLoadError(
        f"checkpoint '{checkpoint.path}' lacks the tensor '{name}', which its {checkpoint.description} asks "
        f"for{where}; {checkpoint.remedy}"
    )


@contextmanager
def open_checkpoint(path: str | Path, *, has_mtp: bool = False) -> Iterator[Checkpoint]:
    """Open the safetensors files of a directory, or a GGUF file, and check the headers. No tensor is read.

    Args:
        path: of the directory or file.
        has_mtp: whether layers of multi-token prediction are kept where they are not a part of the model of text.

    Raises:
        ModelLoadError: if there is no such file, a shard is missing, a file is corrupt or cut off, or the index
            disagrees with the files.
    """
    directory = Path(path)
    with TensorFiles() as files:
        if is_gguf(path):
            yield Checkpoint(directory, _gguf_entries(directory, files), files)
            return
        file = chosen_file(directory)
        if file.suffix == ".json":
            weight_map = read_index(file)
            by_file = {name: _open(files, directory / name) for name in dict.fromkeys(weight_map.values())}
            stored = join_shards(file, weight_map, by_file)
        else:
            stored = _open(files, file)
        yield Checkpoint(directory, *_entries(directory, stored, files, has_mtp=has_mtp))


def _gguf_entries(path: Path, files: TensorFiles) -> dict[str, Entry]:
    gguf = open_gguf(path)
    try:
        return with_joined_latents(gguf_entries(gguf, files.open_file))
    except OSError as error:
        raise ModelLoadError(f"'{path}' could not be read: {error}") from error


def _entries(
    directory: Path, stored: dict[str, StoredTensor], files: TensorFiles, *, has_mtp: bool
) -> tuple[dict[str, Entry], TensorFiles, StoredKVScales]:
    """Return the weights that the tensors hold, each quantised one as a single entry, and the scales of the cache."""

    def read(tensor: StoredTensor) -> bytes:
        memory = bytearray(tensor.stop - tensor.start)
        try:
            files.read_into(memoryview(memory), tensor)
        except OSError as error:
            raise ModelLoadError(f"'{tensor.path}' could not be read: {error}") from error
        return bytes(memory)

    config = directory / "config.json"
    try:
        raw = read_json(config) if config.is_file() else {}
    except OSError as error:
        raise ModelLoadError(f"'{config}' could not be read: {error}") from error
    known = as_known_text(raw)
    tensors = text_tensors(raw, stored, has_mtp=has_mtp)
    entries = group_weights(tensors, read_quantization(directory, known), read)
    architecture = architecture_of(known)
    entries = with_stacked_experts(architecture, with_mlx_layout(architecture, entries))
    entries = _with_flat_decays(with_experts_turned(architecture, entries))
    return entries, files, StoredKVScales(tensors, files)


def _open(files: TensorFiles, file: Path) -> dict[str, StoredTensor]:
    try:
        return files.open(file)
    except OSError as error:
        raise ModelLoadError(f"'{file}' could not be read: {error}") from error


def _with_flat_decays(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Return the weights with the decays of heads as vectors: Kimi Linear stores them as [1, 1, num_heads, 1]."""
    flat = {
        name: stored._replace(shape=(math.prod(stored.shape),))
        for name, stored in entries.items()
        if name.endswith(".A_log") and isinstance(stored, StoredTensor) and max(stored.shape) == math.prod(stored.shape)
    }
    return entries | flat
