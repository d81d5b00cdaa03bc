"""Damaged tensors of GGUF files: the model loads, or is refused with an error that names the file.

test_header.py damages headers, and test_config.py the metadata.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models.gguf.file import open_gguf
from tests.engine.models.checkpoint.formats.test_damaged import load
from tests.engine.models.gguf.conftest import Converted

NAMES = ("llama", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3moe", "phi3", "gemma4-moe")))


@pytest.fixture(scope="module", params=NAMES)
def good(request: pytest.FixtureRequest, converted: Converted) -> Path:
    path = converted(request.param)[1]
    assert load(path) is None
    return path


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return tmp_path_factory.mktemp("damaged") / "damaged.gguf"


@settings(max_examples=12, deadline=None)
@given(data=st.data(), octets=st.binary(min_size=1, max_size=64))
def test_other_blocks_give_weights_or_an_error(good: Path, damaged: Path, data: st.DataObject, octets: bytes) -> None:
    tensor = open_gguf(good).tensors[data.draw(st.sampled_from(sorted(open_gguf(good).tensors)))]
    content = bytearray(good.read_bytes())
    start = data.draw(st.integers(tensor.start, tensor.stop - 1))
    octets = octets[: tensor.stop - start]
    content[start : start + len(octets)] = octets
    damaged.write_bytes(content)
    load(damaged)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_other_names_types_and_sizes_are_refused(good: Path, damaged: Path, data: st.DataObject) -> None:
    tensors = open_gguf(good).tensors
    name = data.draw(st.sampled_from(sorted(tensors)))
    content = bytearray(good.read_bytes())
    written = struct.pack("<Q", len(name)) + name.encode()
    start = content.index(written) + 8
    part = data.draw(st.sampled_from(["name", "dimensions", "sizes", "type"]))
    after = start + len(name)
    if part == "name":
        content[start + data.draw(st.integers(0, len(name) - 1))] ^= data.draw(st.integers(1, 127))
    elif part == "dimensions":
        content[after : after + 4] = struct.pack("<I", data.draw(st.integers(0, 5)))
    elif part == "sizes":
        content[after + 4 : after + 12] = struct.pack("<Q", data.draw(st.integers(0, 1024) | st.just(2**63)))
    else:
        at = after + 4 + 8 * len(tensors[name].shape)
        content[at : at + 4] = struct.pack("<I", data.draw(st.integers(0, 45)))
    damaged.write_bytes(content)
    load(damaged)


def test_a_tensor_that_is_cut_off_is_named(good: Path, damaged: Path) -> None:
    last = max(open_gguf(good).tensors.items(), key=lambda item: item[1].stop)[0]
    damaged.write_bytes(good.read_bytes()[:-40])
    error = load(damaged)
    assert last in str(error)
