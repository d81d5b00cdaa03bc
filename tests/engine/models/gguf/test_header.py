"""Headers of GGUF files: what the package writes is read as its own reader does, and damage is a typed error."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.errors import ConfigError, ModelLoadError
from engine.models.gguf.file import is_gguf, open_gguf
from engine.models.gguf.header import GgufHeader, read_gguf_header

METADATA: dict[str, tuple[str, Any]] = {
    "a.u8": ("add_uint8", 200),
    "a.i8": ("add_int8", -100),
    "a.u16": ("add_uint16", 60000),
    "a.i16": ("add_int16", -30000),
    "a.u32": ("add_uint32", 2**32 - 1),
    "a.i32": ("add_int32", -(2**31)),
    "a.u64": ("add_uint64", 2**64 - 1),
    "a.i64": ("add_int64", -(2**63)),
    "a.f32": ("add_float32", 0.5),
    "a.f64": ("add_float64", 1e-300),
    "a.bool": ("add_bool", True),
    "a.text": ("add_string", "ä▁日本"),
    "a.texts": ("add_array", ["", "<s>", "é"]),
    "a.numbers": ("add_array", [1, -2, 3]),
    "a.floats": ("add_array", [0.5, -1.0]),
    "a.flags": ("add_array", [True, False]),
}
REMEDY = "download|convert it|give "


def write(path: Path, *, alignment: int | None = None, **options: Any) -> Path:
    """Write a file with metadata of every type and tensors of several."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, (method, value) in METADATA.items():
        getattr(writer, method)(key, value)
    random = np.random.default_rng(0)
    writer.add_tensor("vector", random.normal(size=7).astype(np.float32))
    writer.add_tensor("matrix", random.normal(size=(3, 5)).astype(np.float16))
    blocks = random.integers(0, 256, (2, 3, 144), dtype=np.uint8)
    writer.add_tensor("stack", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.add_tensor("last", random.normal(size=(2, 2)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 8, 64])
def test_reads_what_the_package_reads(tmp_path: Path, alignment: int | None) -> None:
    path = write(tmp_path / "a.gguf", alignment=alignment)
    header, theirs = read_gguf_header(path), gguf.GGUFReader(path)
    expected = {key: value for key, (_, value) in METADATA.items()} | {"general.architecture": "llama"}
    assert {key: header.metadata[key] for key in expected} == expected
    assert [type(header.metadata[key]) for key in expected] == [type(value) for value in expected.values()]
    assert header.tensors.keys() == {"vector", "matrix", "stack", "last"}
    for tensor in theirs.tensors:
        ours = header.tensors[tensor.name]
        assert ours.type.name == tensor.tensor_type.name
        assert list(ours.shape) == tensor.shape.tolist()[::-1]
        assert (ours.start, ours.stop) == (tensor.data_offset, tensor.data_offset + tensor.n_bytes)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ConfigError, match="is not a file"):
            open_gguf(path)
    assert is_gguf("/models/a.GGUF")
    assert not is_gguf("/models/gguf")


# --- damage -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("good") / "a.gguf").read_bytes()


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "damaged.gguf"


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def entry(name: bytes, shape: list[int], kind: int, offset: int) -> bytes:
    """Return a tensor's entry in the header."""
    return u64(len(name)) + name + u32(len(shape)) + b"".join(map(u64, shape)) + u32(kind) + u64(offset)


def replace(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert data.count(old) == 1
        return data.replace(old, new)

    return change


VECTOR = entry(b"vector", [7], 0, 0)
KEY = b"a.u8"
DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "it is empty"),
    "magic": (lambda data: b"GGML" + data[4:], "letters GGUF"),
    "version 1": (lambda data: data[:4] + u32(1) + data[8:], "version 1.*convert it"),
    "big-endian": (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big-endian.*convert it"),
    "version 9": (lambda data: data[:4] + u32(9) + data[8:], "version is 9"),
    "2**63 tensors": (lambda data: data[:8] + u64(2**63) + data[16:], "number of tensors is 9223372036854775808"),
    "2**40 pairs": (lambda data: data[:16] + u64(2**40) + data[24:], "number of metadata entries is"),
    "one tensor more": (lambda data: data[:8] + u64(5) + data[16:], "tensor"),
    "a long key": (replace(u64(4) + KEY, u64(2**62) + KEY), "length of a key"),
    "a key twice": (replace(u64(4) + KEY, u64(4) + b"a.i8"), "key 'a.i8' twice"),
    "a key that is not UTF-8": (replace(u64(4) + KEY, u64(4) + b"a.\xff8"), "not valid UTF-8"),
    "an unknown type": (replace(KEY + u32(0), KEY + u32(77)), "'a.u8' has the unknown type 77"),
    "a bool of 2": (replace(b"a.bool" + u32(7) + b"\1", b"a.bool" + u32(7) + b"\2"), "'a.bool' is 2"),
    "a long array": (replace(b"a.texts" + u32(9) + u32(8) + u64(3), b"a.texts" + u32(9) + u32(8) + u64(2**60)),
                     "length of the metadata 'a.texts'"),
    "a long text in it": (replace(u64(3) + b"<s>", u64(2**61) + b"<s>"), "cut off in string 1 of the metadata"),
    "nested arrays": (replace(b"a.numbers" + u32(9) + u32(5), b"a.numbers" + u32(9) + u32(9)), "unknown type 9"),
    "a tensor twice": (replace(u64(6) + b"matrix", u64(6) + b"vector"), "tensor 'vector' twice"),
    "no dimensions": (replace(VECTOR, entry(b"vector", [], 0, 0)), "'vector' has 0 dimensions"),
    "2**32 dimensions": (replace(VECTOR, u64(6) + b"vector" + u32(2**32 - 1)), "has 4294967295 dimensions"),
    "a size of 0": (replace(VECTOR, entry(b"vector", [0], 0, 0)), "'vector' of type F32 has the sizes"),
    "huge sizes": (replace(VECTOR, entry(b"vector", [2**62, 2**62], 0, 0)), "'vector' of type F32 has the sizes"),
    "half a block": (replace(u64(256) + u64(3) + u64(2) + u32(12), u64(255) + u64(3) + u64(2) + u32(12)),
                     "'stack' of type Q4_K has the sizes"),
    "an unknown tensor type": (replace(VECTOR, entry(b"vector", [7], 99, 0)), "'vector' has the unknown type 99"),
    "an unsupported type": (replace(VECTOR, entry(b"vector", [256], 16, 0)), "'vector' of .* type IQ2_XXS.*give a "),
    "a shifted tensor": (replace(VECTOR, entry(b"vector", [7], 0, 32)), "'vector' begins at byte"),
    "a larger tensor": (replace(VECTOR, entry(b"vector", [70], 0, 0)), "'matrix' begins at byte"),
    "a tensor beyond the end": (lambda data: data[:-17], "cut off in the tensor 'last'"),
    "cut in the header": (lambda data: data[:300], "cut off|length of|number of"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error_that_names_the_file(good: bytes, damaged: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    damaged.write_bytes(change(good))
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_gguf_header(damaged)
    assert str(damaged) in str(caught.value)
    assert any(remedy in str(caught.value) for remedy in REMEDY.split("|"))


@pytest.mark.parametrize("alignment", [0, 3, 2**21, "32"])
def test_a_wrong_alignment_is_refused(tmp_path: Path, alignment: Any) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    add = writer.add_string if isinstance(alignment, str) else writer.add_uint32
    add("general.alignment", alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="general.alignment=.* is not a power of two"):
        read_gguf_header(tmp_path / "a.gguf")


@given(st.data())
@example(None)
def test_random_damage_is_read_or_is_a_typed_error(good: bytes, damaged: Path, data: st.DataObject | None) -> None:
    content = bytearray(good)
    if data is not None:
        for _ in range(data.draw(st.integers(1, 3))):
            position = data.draw(st.integers(0, len(content) - 9))
            number = data.draw(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]) | st.integers(0, 255))
            width = data.draw(st.sampled_from([1, 4, 8]))
            content[position : position + width] = (number % 256**width).to_bytes(width, "little")
        content = content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))]
    damaged.write_bytes(content)
    if (header := _header_unless_refused(damaged)) is not None:
        assert all(tensor.stop <= len(content) for tensor in header.tensors.values())
    else:
        assert data is not None


def _header_unless_refused(path: Path) -> GgufHeader | None:
    try:
        return read_gguf_header(path)
    except ModelLoadError as error:
        if str(path) not in str(error):
            raise
        return None


def test_hostile_counts_take_no_memory(good: bytes, damaged: Path) -> None:
    hostile = [DAMAGES[name][0](good) for name in ("2**63 tensors", "2**40 pairs", "a long array", "huge sizes")]
    tracemalloc.start()
    for content in hostile:
        damaged.write_bytes(content)
        with pytest.raises(ModelLoadError):
            read_gguf_header(damaged)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


# --- split files --------------------------------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    """A model of three files."""
    write(tmp_path / "a.gguf", split_max_tensors=2)
    parts = sorted(tmp_path.glob("a-*.gguf"))
    assert [part.name for part in parts] == ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
    return parts


def test_split_files_are_one_model(split: list[Path], tmp_path: Path) -> None:
    whole = open_gguf(write(tmp_path / "whole.gguf"))
    joined = open_gguf(split[0])
    assert list(joined.tensors) == list(whole.tensors)
    for name, tensor in joined.tensors.items():
        ours, other = tensor, whole.tensors[name]
        assert ours.path.read_bytes()[ours.start : ours.stop] == other.path.read_bytes()[other.start : other.stop]
    assert joined.metadata["a.text"] == "ä▁日本"


def test_wrong_parts_are_refused(split: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="part 2 of several; give the path of the first"):
        open_gguf(split[1])
    second = split[1].read_bytes()
    split[1].write_bytes(split[0].read_bytes())
    with pytest.raises(ModelLoadError, match="says that it is part 0 of 2"):
        open_gguf(split[0])
    split[1].unlink()
    with pytest.raises(ModelLoadError, match="needs '.*a-00002-of-00002.gguf' beside it; download"):
        open_gguf(split[0])
    split[1].write_bytes(second)
    renamed = split[0].rename(tmp_path / "b.gguf")
    with pytest.raises(ModelLoadError, match="must end in '-00001-of-00002.gguf'"):
        open_gguf(renamed)


def test_parts_with_too_few_tensors_are_refused(split: list[Path]) -> None:
    data = split[0].read_bytes()
    key = b"split.tensors.count" + u32(5)
    at = data.index(key) + len(key)
    split[0].write_bytes(data[:at] + struct.pack("<i", 9) + data[at + 4 :])
    with pytest.raises(ModelLoadError, match="hold 4 tensors, and the first says 9"):
        open_gguf(split[0])
