"""Seconds to load a checkpoint that is not in memory, beside the time to read the same bytes from the disk.

    python -m benchmarks.loading --model DIR --rounds 5 --out result.json

Before each run the files are dropped from the page cache, and the script ends with an error if they are still there.
Plain reading, reading to keep, and loading alternate. Plain reading is several threads that read blocks into memory of
their own again and again, with the number of threads and the size of blocks that are the fastest of a few. Reading to
keep does the same into new memory for all the bytes, on huge pages, as weights need it: a machine may take longer to
give a process memory than to read its disk. *x disk* and *x kept* are the medians of the ratios to the two. The
checkpoint is also written in float32 next to the original, for two more cases, and removed at the end. CPU seconds are
those of all threads: where other work takes the processor, they are what can be compared.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import mmap
import os
import resource
import shutil
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.machine import describe, release_memory
from benchmarks.result_file import write_result
from engine.models.adapter.loader import load_transformers_decoder
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.transformers_config import TransformersConfig
from engine.models.decoder.loader import load_decoder
from engine.models.tensor_parallel import TensorParallel
from kernels.cpu.memory import huge_zeros

__all__ = ["drop_from_page_cache", "main", "plain_read", "resident_share"]

MIB = 2**20
PLAIN = [(2, 4 * MIB), (4, 4 * MIB), (8, 4 * MIB), (4, MIB), (16, MIB)]  # threads, bytes of a block
CPU = torch.device("cpu")
MAX_MODEL_LEN = 4096
MOST_RESIDENT = 0.01  # of a file, after it was dropped


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds of one run, and of the processor in all its threads."""

    seconds: float
    cpu_seconds: float


def resident_share(path: Path) -> float:
    """Return which share of a file's pages is in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        failed = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data))
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return float((pages & 1).mean())


def drop_from_page_cache(paths: list[Path]) -> None:
    """Remove files from the page cache.

    Raises:
        RuntimeError: if the system keeps them.
    """
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if (share := resident_share(path)) > MOST_RESIDENT:
            raise RuntimeError(
                f"'{path}' is still in the page cache ({100 * share:.0f}%); is another process using it?"
            )


def plain_read(paths: list[Path], threads: int, block_bytes: int, *, keep: bool = False) -> list[torch.Tensor]:
    """Read all bytes of the files, in blocks that the threads take in turn; return them if they are to be kept."""
    kept: list[torch.Tensor] = []
    with open_files(paths) as files:
        sizes = [os.fstat(file).st_size for file in files]
        kept += [huge_zeros((size,), torch.uint8) for size in sizes] if keep else []
        blocks = iter([(number, start) for number, size in enumerate(sizes) for start in range(0, size, block_bytes)])
        lock = threading.Lock()

        def work() -> None:
            memory = memoryview(bytearray(block_bytes))
            while True:
                with lock:
                    number, start = next(blocks, (-1, 0))
                if number < 0:
                    return
                into = kept[number][start : start + block_bytes].numpy().data if keep else memory
                os.preadv(files[number], [into], start)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return kept


@contextmanager
def open_files(paths: list[Path]) -> Iterator[list[int]]:
    """Open files for the ``with``."""
    files = [os.open(path, os.O_RDONLY) for path in paths]
    try:
        yield files
    finally:
        for file in files:
            os.close(file)


def load(directory: Path, dtype: torch.dtype, model_impl: str) -> object:
    """Load a checkpoint as an engine does."""
    config = load_hf_config(directory)
    if model_impl == "transformers":
        shape = TransformersConfig.from_hf(config)
        return load_transformers_decoder(directory, shape, dtype=dtype, device=CPU, parallel=TensorParallel())
    return load_decoder(
        directory, config, dtype=dtype, device=CPU, max_model_len=MAX_MODEL_LEN, parallel=TensorParallel()
    )


def timed(paths: list[Path], run: Callable[[], object]) -> Run:
    """Return the time of ``run`` without the files in memory; what it returns is freed."""
    drop_from_page_cache(paths)
    before, started = resource.getrusage(resource.RUSAGE_SELF), perf_counter()
    kept = run()
    seconds, after = perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    del kept
    release_memory(CPU)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(round(seconds, 6), round(used, 6))


def fastest_plain(paths: list[Path], repeats: int) -> tuple[int, int]:
    """Return the threads and block size of PLAIN that read the files in the shortest median time."""
    times: dict[tuple[int, int], list[float]] = {item: [] for item in PLAIN}
    for _, order in itertools.product(range(repeats), PLAIN):
        times[order].append(timed(paths, lambda order=order: plain_read(paths, *order)).seconds)  # type: ignore[misc]
    return min(PLAIN, key=lambda order: statistics.median(times[order]))


def write_float32(source: Path, target: Path) -> None:
    """Write a checkpoint's weights in float32, in one file for each."""
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            save_file(
                {name: tensor.float() for name, tensor in load_file(file).items()}, target / file.name, {"format": "pt"}
            )
        elif file.is_file():
            shutil.copy(file, target)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write JSON to ``--out``."""
    parser = argparse.ArgumentParser(description="Loading beside the disk.")
    parser.add_argument("--model", required=True, type=Path, help="directory of a checkpoint in bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    load_average, results, plain_runs = os.getloadavg()[0], [], {}
    columns = ("disk s", "kept s", "load s", "x disk", "x kept", "CPU s")
    print(f"{'stored':9} {'loaded':9} {'by':13} {'GB':>5} " + " ".join(f"{name:>7}" for name in columns))
    with tempfile.TemporaryDirectory(prefix="pg-float32-", dir=options.model.resolve().parent) as float32:
        write_float32(options.model, Path(float32))
        for directory, stored, loaded in (
            (options.model, torch.bfloat16, torch.bfloat16),
            (Path(float32), torch.float32, torch.float32),
            (Path(float32), torch.float32, torch.bfloat16),
        ):
            paths = sorted(directory.glob("*.safetensors"))
            if stored not in plain_runs:
                plain_runs[stored] = fastest_plain(paths, 3)
            threads, block_bytes = plain_runs[stored]
            for model_impl in ("pagoda", "transformers"):
                load(directory, loaded, model_impl)  # imports, and compiles the kernels
                runs = [
                    (
                        timed(paths, lambda: plain_read(paths, threads, block_bytes)),  # noqa: B023
                        timed(paths, lambda: plain_read(paths, threads, block_bytes, keep=True)),  # noqa: B023
                        timed(paths, lambda: load(directory, loaded, model_impl)),  # noqa: B023
                    )
                    for _ in range(options.rounds)
                ]
                result = {
                    "stored": str(stored).removeprefix("torch."),
                    "loaded": str(loaded).removeprefix("torch."),
                    "by": model_impl,
                    "gb": round(sum(path.stat().st_size for path in paths) / 1e9, 3),
                    "disk_s": statistics.median(plain.seconds for plain, _, _ in runs),
                    "kept_s": statistics.median(kept.seconds for _, kept, _ in runs),
                    "load_s": statistics.median(run.seconds for _, _, run in runs),
                    "over_disk": round(statistics.median(run.seconds / plain.seconds for plain, _, run in runs), 3),
                    "over_kept": round(statistics.median(run.seconds / kept.seconds for _, kept, run in runs), 3),
                    "load_cpu_s": statistics.median(run.cpu_seconds for _, _, run in runs),
                    "plain_threads": threads,
                    "plain_block_bytes": block_bytes,
                    "runs": [[asdict(item) for item in of_round] for of_round in runs],  # plain, to keep, loading
                }
                results.append(result)
                values = (
                    result[name] for name in ("disk_s", "kept_s", "load_s", "over_disk", "over_kept", "load_cpu_s")
                )
                print(
                    f"{result['stored']:9} {result['loaded']:9} {model_impl:13} {result['gb']:5.2f} "
                    + " ".join(f"{value:7.2f}" for value in values),
                    flush=True,
                )
    if options.out:
        document = {
            "machine": describe(CPU),
            "model": options.model.name,
            "load_average_before": round(load_average, 2),
        }
        document |= {"threads": torch.get_num_threads(), "results": results}
        write_result(options.out, document)


if __name__ == "__main__":
    main()
