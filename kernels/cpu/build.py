"""build: compiles the C kernels with the system's compiler when they are first used, and caches the library.

The library is built for the processor it runs on, without AMX if the system refuses it. Its file is named after a hash
of the sources, the compiler, its flags and the processor's features, so a change of any of them builds another one.
Without a compiler torch computes; see library.py. ``PAGODA_CPU_CFLAGS`` adds flags, such as "-march=x86-64-v3" to test
what an older processor would run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path

from kernels.cgroup import available_cpus
from kernels.cpu.tiles import tiles_granted
from kernels.home import home_for

__all__ = ["BuildError", "build", "cache_directory", "compiler"]

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
_FLAGS = (  # csrc/runtime/vector.h says why nothing is contracted
    *("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-pthread"),
    *("-Wall", "-Wextra", "-Wno-psabi"),
)
_COMPILERS = ("cc", "gcc", "clang")


class BuildError(Exception):
    """The kernels cannot be compiled here; the message says why."""


def cache_directory() -> Path:
    """Return where compiled kernels are kept: ``PAGODA_CACHE_DIR``, or ``pagoda`` in the user's cache directory.

    A user without a home directory that can be written has a private one below TMPDIR.

    Raises:
        BuildError: if that cannot be made either.
    """
    if configured := os.environ.get("PAGODA_CACHE_DIR"):
        return Path(configured)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "pagoda"
    try:
        return home_for(".cache/pagoda") / ".cache" / "pagoda"
    except OSError as error:
        raise BuildError(f"there is no cache directory ({error}); set PAGODA_CACHE_DIR") from error


def build() -> Path:
    """Return the path of the compiled library, building it unless an earlier run has.

    Raises:
        BuildError: if there is no compiler, it fails, or the cache directory cannot be written.
    """
    command = compiler()  # and arguments, as CC may name them
    sources = sorted(SOURCES.rglob("*.c"))
    if not sources:
        raise BuildError(f"'{SOURCES}' holds no sources; install Pagoda from its checkout")
    library = cache_directory() / f"cpu-kernels-{_key(command, sources)}.so"
    if not library.is_file():
        with _only_builder(library.parent):
            if not library.is_file():  # no other process has built it meanwhile
                logger.info("Compiling the CPU kernels, once for this machine")
                _compile(command, sources, library)
    return library


@contextmanager
def _only_builder(directory: Path) -> Iterator[None]:
    """Let one process at a time run the block: replicas that start together would compile the same sources."""
    try:
        import fcntl

        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except ImportError as error:  # not a POSIX system
        raise BuildError(f"the kernels are not built on {platform.system()}") from error
    except OSError as error:
        raise BuildError(f"'{directory}' cannot be written ({error.strerror}); set PAGODA_CACHE_DIR") from error
    with lock:
        yield


def _flags() -> list[str]:
    without_tiles = () if tiles_granted() else ("-DPAGODA_WITHOUT_TILES",)  # csrc/runtime/tiles.h
    return [*_FLAGS, *without_tiles, *os.environ.get("PAGODA_CPU_CFLAGS", "").split()]


def compiler() -> list[str]:
    """Return the command of the C compiler: that of ``CC``, else the first of cc, gcc and clang.

    Raises:
        BuildError: if none is installed.
    """
    names = (os.environ["CC"],) if os.environ.get("CC") else _COMPILERS
    for name in names:
        program, *arguments = shlex.split(name)
        if path := shutil.which(program):
            return [path, *arguments]
    raise BuildError(f"no C compiler is installed (looked for {', '.join(names)})")


def _key(compiler: list[str], sources: list[Path]) -> str:
    state = os.stat(compiler[0])
    parts = [*_flags(), *compiler, str(state.st_size), str(state.st_mtime_ns), platform.machine(), _features()]
    digest = hashlib.sha256("\n".join(parts).encode())
    for file in sorted([*sources, *SOURCES.rglob("*.h")]):
        digest.update(str(file.relative_to(SOURCES)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:20]


def _features() -> str:
    """Return what ``-march=native`` depends on: one home directory may serve several kinds of machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _compile(compiler: list[str], sources: list[Path], library: Path) -> None:
    """Compile the files in parallel, and move the finished library to its path atomically."""
    with tempfile.TemporaryDirectory(dir=library.parent) as directory, ThreadPool(available_cpus()) as pool:
        objects = [Path(directory) / f"{index}.o" for index in range(len(sources))]
        pool.starmap(
            _run,
            [
                (*compiler, *_flags(), f"-I{SOURCES}", "-c", source, "-o", object_file)
                for source, object_file in zip(sources, objects, strict=True)
            ],
            chunksize=1,  # or two cores could compile the two slow files one after the other
        )
        unfinished = Path(directory) / library.name
        _run(*compiler, *_flags(), "-shared", *objects, "-o", unfinished, "-lm")
        os.replace(unfinished, library)


def _run(compiler: str, *arguments: str | Path) -> None:
    try:
        outcome = subprocess.run(
            [compiler, *map(str, arguments)], capture_output=True, encoding="utf-8", errors="replace", check=False
        )
    except OSError as error:
        raise BuildError(f"{compiler} cannot be run ({error.strerror})") from error
    if outcome.returncode:
        raise BuildError(f"{compiler} failed: {outcome.stderr.strip()[-500:]}")
