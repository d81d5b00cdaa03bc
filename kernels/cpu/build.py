"""Compiles the C kernels with the system's compiler when they are first used, and keeps the result.

The library is built for the very processor it runs on, so its file is named after the sources, the compiler, its flags
and the processor's features: whatever changes, it is built anew. A machine without a compiler does without; see
library.py. ``PAGODA_CPU_CFLAGS`` adds flags, "-march=x86-64-v3" to try out what an older processor would run, say.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["BuildError", "build", "cache_directory"]

SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Wno-psabi")
_COMPILERS = ("cc", "gcc", "clang")


class BuildError(Exception):
    """The kernels cannot be compiled here; the message says why."""


def cache_directory() -> Path:
    """Return where compiled kernels are kept: ``PAGODA_CACHE_DIR``, or ``pagoda`` in the user's cache directory."""
    if configured := os.environ.get("PAGODA_CACHE_DIR"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagoda"


def build() -> Path:
    """Return the compiled library, building it unless an earlier run has.

    Raises:
        BuildError: if there is no compiler, it fails, or the cache directory cannot be written.
    """
    compiler = _compiler()
    sources = sorted(SOURCES.glob("*.c"))
    library = cache_directory() / f"cpu-kernels-{_key(compiler, sources)}.so"
    if not library.is_file():
        _compile(compiler, sources, library)
    return library


def _flags() -> list[str]:
    return [*_FLAGS, *os.environ.get("PAGODA_CPU_CFLAGS", "").split()]


def _compiler() -> str:
    names = (os.environ["CC"],) if os.environ.get("CC") else _COMPILERS
    for name in names:
        if found := shutil.which(name):
            return found
    raise BuildError(f"no C compiler is installed (looked for {', '.join(names)})")


def _key(compiler: str, sources: list[Path]) -> str:
    state = os.stat(compiler)
    parts = [" ".join(_flags()), compiler, str(state.st_size), str(state.st_mtime_ns), platform.machine(), _features()]
    digest = hashlib.sha256("\n".join(parts).encode())
    for file in sorted([*sources, *SOURCES.glob("*.h")]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:20]


def _features() -> str:
    """Return what ``-march=native`` depends on: one home directory may serve several kinds of machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _compile(compiler: str, sources: list[Path], library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(suffix=".so", dir=library.parent)
    except OSError as error:
        raise BuildError(f"'{library.parent}' cannot be written ({error.strerror}); set PAGODA_CACHE_DIR") from error
    os.close(descriptor)
    try:
        command = [compiler, *_flags(), *map(str, sources), "-o", unfinished, "-lm"]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        if outcome.returncode:
            raise BuildError(f"{compiler} failed: {outcome.stderr.strip()[-500:]}")
        os.replace(unfinished, library)  # at once, so that processes which start together never see half of it
    finally:
        Path(unfinished).unlink(missing_ok=True)
