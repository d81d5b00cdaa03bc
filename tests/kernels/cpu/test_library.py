"""Building the library: cached, built once by processes that start together, and optional."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
import threading
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
import torch

from kernels.cpu import build as building
from kernels.cpu.build import BuildError, build
from kernels.cpu.library import library
from kernels.cpu.linear import PackedLinear, WeightKind, has_tiles, linear


def test_a_second_build_finds_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, cache = tmp_path / "csrc", tmp_path / "cache"
    sources.mkdir()
    (sources / "one.c").write_text("int one(void) { return 1; }\n")
    monkeypatch.setattr(building, "SOURCES", sources)
    monkeypatch.setenv("PAGODA_CACHE_DIR", str(cache))
    first = build()
    assert first.parent == cache
    assert sorted(cache.iterdir()) == [first, cache / "lock"]  # nothing unfinished is left
    monkeypatch.setattr(building, "_compile", lambda *_: pytest.fail("the library was built already"))
    assert build() == first


def test_as_many_compilers_run_as_this_process_may_use_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[int] = []

    def pool(size: int) -> ThreadPool:
        pools.append(size)
        return ThreadPool(size)

    (tmp_path / "one.c").write_text("int one(void) { return 1; }\n")
    monkeypatch.setattr(building, "SOURCES", tmp_path)
    monkeypatch.setattr(building, "ThreadPool", pool)
    monkeypatch.setattr(building, "available_cpus", lambda: 3)
    monkeypatch.setenv("PAGODA_CACHE_DIR", str(tmp_path / "cache"))
    build()
    assert pools == [3]


def test_processes_that_start_together_build_it_once(tmp_path: Path) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "one.c").write_text("int one(void) { return 1; }\n")
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nsleep 0.3\nexec cc "$@"\n')
    compiler.chmod(0o755)
    program = f"""
from pathlib import Path
from kernels.cpu import build
build.SOURCES = Path({str(sources)!r})
build.build()
"""
    environment = os.environ | {"CC": str(compiler), "PAGODA_CACHE_DIR": str(tmp_path / "cache")}
    root = Path(__file__).parents[3]
    processes = [subprocess.Popen([sys.executable, "-c", program], cwd=root, env=environment) for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    assert len((tmp_path / "calls").read_text().splitlines()) == 2  # the file, and the library


def test_other_sources_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "one.c").write_text("int one(void) { return 1; }\n")
    monkeypatch.setattr(building, "SOURCES", sources)
    monkeypatch.setenv("PAGODA_CACHE_DIR", str(tmp_path / "cache"))
    built = {build()}
    (sources / "one.c").write_text("int one(void) { return 2; }\n")
    built.add(build())
    (sources / "one.h").write_text("#define ONE 1\n")
    built.add(build())
    assert len(built) == 3


def test_a_process_that_is_refused_tiles_has_a_library_without_them(tmp_path: Path) -> None:
    """The system refuses them to a process with a signal stack that is too small to save them."""
    if not has_tiles():
        pytest.skip("this processor has no tiles")
    (tmp_path / "runtime").symlink_to(building.SOURCES / "runtime")
    (tmp_path / "one.c").write_text('#include "runtime/tiles.h"\nint has_tiles(void) { return PAGODA_HAS_TILES; }\n')
    program = f"""
import ctypes
from pathlib import Path
from kernels.cpu import build
class Stack(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("bytes", ctypes.c_size_t))
def has_tiles():
    return ctypes.CDLL(str(build.build())).has_tiles()
build.SOURCES = Path({str(tmp_path)!r})
memory = ctypes.create_string_buffer(8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, len(memory))), None) == 0
assert not has_tiles()
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(None, 2, 0)), None) == 0  # disables it
build.tiles_granted.cache_clear()
assert has_tiles()
"""
    environment = os.environ | {"PAGODA_CACHE_DIR": str(tmp_path / "cache")}
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=root, env=environment)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are of x86-64")
@pytest.mark.parametrize("flags", ["-mno-amx-tile", "-march=x86-64-v3", "-march=x86-64"])
def test_linear_layers_compile_for_other_processors(flags: str) -> None:
    """They have other loops where there are no tiles. Longer tests build and run them."""
    sources = sorted(building.SOURCES.glob("linear/*.c"))
    options = ["-std=gnu11", "-march=native", flags, "-fsyntax-only", "-w", f"-I{building.SOURCES}"]
    subprocess.run([*building.compiler(), *options, *sources], check=True, timeout=120)


def test_without_a_compiler_the_error_lists_those_that_it_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"looked for cc, gcc, clang\)"):
        build()


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [("CC", "no-such-compiler", "no C compiler"), ("PAGODA_CACHE_DIR", "/proc/nowhere", "cannot be written")],
)
def test_an_error_names_what_is_missing(
    variable: str, value: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGODA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(variable, value)
    with pytest.raises(BuildError, match=reason):
        build()


def test_an_error_quotes_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "broken.c").write_text("this is not C\n")
    monkeypatch.setattr(building, "SOURCES", sources)
    monkeypatch.setenv("PAGODA_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(BuildError, match="error"):
        build()
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["lock"]


def test_without_a_compiler_there_is_a_warning_and_no_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAGODA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert library() is None
        assert "no C compiler" in caplog.text
    finally:
        library.cache_clear()


def test_two_engines_may_compute_at_the_same_time(num_threads: int) -> None:
    weight = torch.randn(512, 256)
    packed = PackedLinear(WeightKind.FLOAT32, 256, 512)
    packed.set_weight(weight)
    inputs = [torch.randn(3, 256) for _ in range(4)]
    wrong: list[int] = []

    def compute(index: int) -> None:
        for _ in range(200):
            if not torch.allclose(linear(inputs[index], packed), inputs[index] @ weight.t(), atol=1e-4):
                wrong.append(index)

    threads = [threading.Thread(target=compute, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_computes_without_its_parents_threads() -> None:
    if not hasattr(os, "fork"):
        pytest.skip("this system does not fork")
    program = """
import os, torch
from kernels.cpu.library import set_num_threads
from kernels.cpu.linear import PackedLinear, WeightKind, linear
set_num_threads(3)
packed = PackedLinear(WeightKind.FLOAT32, 256, 2048)
packed.set_weight(torch.ones(2048, 256))
assert linear(torch.ones(2, 256), packed).eq(256).all()
child = os.fork()
if child == 0:
    set_num_threads(2)
    os._exit(0 if linear(torch.ones(2, 256), packed).eq(256).all() else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=Path(__file__).parents[3])
