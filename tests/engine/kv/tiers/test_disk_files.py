"""The files of the disk cache: which one an engine takes, what it refuses, and which blocks it drops first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.kv.tiers.digests import TokenChain, root_digest
from engine.kv.tiers.disk import slot_file
from engine.kv.tiers.disk.slot_header import SlotHeader
from engine.kv.tiers.page_format import PageFormat, PageKind
from tests.engine.kv.tiers.disk_engines import PROMPT, SIZE, answer, disk_of, make
from tests.engine.shadow import make_engine


def test_engines_that_share_a_directory_take_a_file_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, runner = make(tmp_path)
    second, _ = make(tmp_path, runner)
    paths = [disk_of(engine)._file.path for engine in (first, second)]
    assert [path.name[-5:] for path in paths] == ["-0.kv", "-1.kv"]
    assert answer(first, runner) == 0
    monkeypatch.setattr(slot_file, "_MAX_FILES", 2)
    with pytest.raises(ConfigError, match="has 2 files of this model, and other engines use all of them"):
        make(tmp_path)
    first.close()
    third, again = make(tmp_path, runner)
    assert disk_of(third)._file.path == paths[0]
    assert answer(third, again) == len(PROMPT) // SIZE * SIZE
    second.close()
    third.close()


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ConfigError, match=r"disk_cache_path='.*file' cannot be used"):
        make(path)


@pytest.mark.parametrize("name", ["ftruncate", "pread"])
def test_a_file_that_cannot_be_prepared_leaves_nothing_open(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(slot_file.os, name, full)
        with pytest.raises(ConfigError, match="cannot be used: No space left on device"):
            make(tmp_path)
    links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert [link for link in links if link.startswith(str(tmp_path))] == []


def test_a_cache_without_room_for_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="disk_cache_gib=1e-09 holds no block"):
        make(tmp_path, disk_cache_gib=1e-9)


@pytest.mark.parametrize("options", [{"num_host_blocks": 0}, {"num_host_blocks": 8, "enable_prefix_caching": False}])
def test_a_disk_cache_needs_a_host_pool_and_the_prefix_cache(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="needs a host pool and the prefix cache"):
        make_engine(disk_cache_path=str(tmp_path), **options)  # type: ignore[arg-type]


def test_the_beginning_of_a_text_outlives_its_end_also_after_a_restart(tmp_path: Path) -> None:
    options = {"disk_cache_gib": 12 * 4096 / 2**30, "num_blocks": 60}
    engine, runner = make(tmp_path, **options)
    first, second = PROMPT[:32], [7] * 16
    assert answer(engine, runner, first, max_tokens=1) == 0  # 8 blocks
    engine.close()
    engine, runner = make(tmp_path, runner, **options)
    assert answer(engine, runner, second, max_tokens=1) == 0  # 4 blocks
    assert answer(engine, runner, [9] * 12, max_tokens=1) == 0  # 3 blocks, for which the end of the first text goes
    engine.close()
    for prompt, cached in ((first, 20), (second, 15), ([9] * 12, 11)):
        engine, runner = make(tmp_path, runner, **options)
        assert disk_of(engine).num_blocks == 12
        chain = engine.tiers.chain(prompt, "")  # type: ignore[union-attr]
        on_disk = [chain.digest(index) in disk_of(engine)._indices[0] for index in range(chain.num_blocks)]
        assert sum(on_disk) == -(-cached // SIZE)
        assert on_disk == sorted(on_disk, reverse=True)
        engine.close()


def test_a_text_longer_than_the_disk_is_saved_in_part(tmp_path: Path) -> None:
    engine, runner = make(tmp_path, disk_cache_gib=4 * 4096 / 2**30)
    assert answer(engine, runner) == 0
    assert disk_of(engine).num_blocks == 4
    engine.close()
    engine, again = make(tmp_path, runner, disk_cache_gib=4 * 4096 / 2**30)
    assert answer(engine, again) == 4 * SIZE
    engine.close()


def test_a_header_that_was_changed_is_not_read() -> None:
    header = SlotHeader(b"d" * 16, b"p" * 16, 2**64 - 1, 7, b"tokens!!" * 2, 5, 3)
    data = header.pack(4)
    assert len(data) == SlotHeader.num_bytes(4) == 512
    assert SlotHeader.unpack(data, 4) == header
    end = len(data.rstrip(b"\0"))
    for position in range(end):
        changed = bytearray(data)
        changed[position] ^= 16
        assert SlotHeader.unpack(bytes(changed), 4) is None
    assert SlotHeader.unpack(data, 8) is None
    assert SlotHeader.unpack(data[: end - 1], 4) is None


def test_digests_depend_on_the_format_the_key_and_all_tokens_before() -> None:
    def chain(tokens: list[int], key: str = "", digest: bytes = b"f" * 16) -> TokenChain:
        return TokenChain(tokens, 2, cache_key=key, model="m", format_digest=digest)

    names = [
        chain([1, 2, 3, 4, 5]).digest(1),
        chain([1, 2, 3, 4], "key").digest(1),
        chain([1, 2, 3, 4], digest=b"g" * 16).digest(1),
        chain([2, 1, 3, 4]).digest(1),
        chain([1, 2, 4, 3]).digest(1),
        chain([3, 4]).digest(0),
    ]
    assert len(set(names)) == len(names)
    assert chain([1, 2, 3, 4, 6]).digest(1) == names[0]
    assert chain([]).digest(-1) == root_digest(b"f" * 16, "")


def test_formats_differ_in_all_that_pages_depend_on() -> None:
    kinds = (PageKind("blocks", 64), PageKind("states", 8))
    formats = [
        PageFormat(b"m", 4, kinds),
        PageFormat(b"n", 4, kinds),
        PageFormat(b"m", 8, kinds),
        PageFormat(b"m", 4, kinds[:1]),
        PageFormat(b"m", 4, (PageKind("blocks", 32), kinds[1])),
    ]
    assert len({page_format.digest for page_format in formats}) == len(formats)
