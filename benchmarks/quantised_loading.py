"""Seconds to read quantised weights in bfloat16, beside reading their bytes and writing as many in bfloat16.

    python -m benchmarks.quantised_loading --rounds 5 --out result.json
    python -m benchmarks.quantised_loading --codes --rounds 5 --out result.json  # weights that stay codes
    python -m benchmarks.quantised_loading --codes --cold --rounds 5 --out result.json  # that are read from the disk

A checkpoint of random codes is written for each format, of `--matrices` of 4096 x 4096 weights. Its files are in the
page cache. *plain* reads their bytes and fills new memory for the weights in bfloat16, on as many threads as loading
has; *load* reads, dequantises and checks the weights, as an engine does. They alternate, and *x plain* is the median of
the ratios. With `--codes`, *load* reads and packs the codes, and *plain* fills as much memory as they take. With
`--cold`, the files are dropped from the page cache before each run, and *plain* only reads them. *peak_mb* is
the memory that *load* takes, in a run that is not timed, the loaded weights included. CPU seconds are those
of all threads: where other work takes the processor, they are what can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import save_file

from benchmarks.loading import CPU, Run, drop_from_page_cache, plain_read
from benchmarks.machine import describe, release_memory
from benchmarks.result_file import write_result
from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.checkpoint.files.read_ahead import NUM_THREADS, read_ahead
from engine.models.checkpoint.finite import is_finite
from engine.models.checkpoint.own_memory import own_memory
from kernels.coded_weight import CodedMatrix, CodedWeight, Section
from kernels.cpu.coded_linear import CodedLinear
from kernels.dequant.gguf_types import GGUF_TYPES, GgufType

__all__ = ["main"]

SIZE, GROUP = 4096, 128
MIB = 2**20
Tensors = dict[str, torch.Tensor]


def octets(*shape: int) -> torch.Tensor:
    """Return random bytes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def words(*shape: int) -> torch.Tensor:
    """Return random words."""
    return octets(*shape[:-1], 4 * shape[-1]).view(torch.int32)


def scales(*shape: int) -> torch.Tensor:
    """Return positive numbers."""
    return torch.rand(shape) / 100 + 0.001


def fp8() -> Tensors:
    """Return codes, none of them a NaN, and scales of 128 x 128 blocks."""
    codes = (octets(SIZE, SIZE) & 0xBF).view(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales(SIZE // GROUP, SIZE // GROUP)}


def nvfp4() -> Tensors:
    """Return ModelOpt's codes, FP8 scales of 16 columns, and the scale of those."""
    own = scales(SIZE, SIZE // 16).to(torch.float8_e4m3fn)
    return {"weight": octets(SIZE, SIZE // 2), "weight_scale": own, "weight_scale_2": torch.tensor(0.01)}


def int4() -> Tensors:
    """Return words of compressed-tensors, symmetric."""
    own = scales(SIZE, SIZE // GROUP).bfloat16()
    return {
        "weight_packed": words(SIZE, SIZE // 8),
        "weight_scale": own,
        "weight_shape": torch.tensor([SIZE, SIZE]),
    }


def gptq() -> Tensors:
    """Return words that are packed along the inputs."""
    groups = SIZE // GROUP
    return {
        "qweight": words(SIZE // 8, SIZE),
        "qzeros": words(groups, SIZE // 8),
        "scales": scales(groups, SIZE).half(),
    }


def awq() -> Tensors:
    """Return words that are packed along the outputs."""
    groups = SIZE // GROUP
    return {
        "qweight": words(SIZE, SIZE // 8),
        "qzeros": words(groups, SIZE // 8),
        "scales": scales(groups, SIZE).half(),
    }


def nf4() -> Tensors:
    """Return codes of bitsandbytes with scales of 64 elements."""
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [SIZE, SIZE]}).encode()
    return {
        "weight": octets(SIZE * SIZE // 2, 1),
        "weight.absmax": scales(SIZE * SIZE // 64),
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(state), dtype=torch.uint8),
    }


def mxfp4() -> Tensors:
    """Return codes of compressed-tensors, with exponents of 32 columns, which keep the numbers finite."""
    return {"weight_packed": octets(SIZE, SIZE // 2), "weight_scale": octets(SIZE, SIZE // 32) // 4 + 90}


def gpt_oss() -> Tensors:
    """Return a stack of one expert of GPT-OSS, which is transposed."""
    shape = (1, SIZE, SIZE // 32)
    return {"experts.down_proj_blocks": octets(*shape, 16), "experts.down_proj_scales": octets(*shape) // 4 + 90}


def mlx() -> Tensors:
    """Return words of MLX, with a scale and a bias for each 64 columns."""
    own = scales(SIZE, SIZE // 64).bfloat16()
    return {"weight": words(SIZE, SIZE // 8).view(torch.uint32), "scales": own, "biases": -8 * own}


FORMATS: dict[str, tuple[Callable[[], Tensors], dict[str, Any]]] = {
    "FP8": (fp8, {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}),
    "NVFP4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "int4": (int4, {"quant_method": "compressed-tensors"}),
    "GPTQ": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "AWQ": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP}),
    "MXFP4": (mxfp4, {"quant_method": "compressed-tensors"}),
    "GPT-OSS": (gpt_oss, {"quant_method": "mxfp4"}),
    "MLX": (mlx, {"quant_method": "mlx", "bits": 4, "group_size": 64}),
    "NF4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}

_NOT_CODED = ("GPT-OSS",)  # are transposed
GGUF = {f"GGUF {kind.name}": kind for kind in GGUF_TYPES.values() if kind.block_elements > 1}


def write_gguf(path: Path, kind: GgufType, num_matrices: int) -> None:
    """Write a GGUF file of random blocks, whose float16 are finite."""
    writer = GGUFWriter(path, "qwen2")
    writer.add_block_count(num_matrices)
    for index in range(num_matrices):
        blocks = octets(SIZE, kind.row_bytes(SIZE)) & 0x3B
        number = next(number for number, other in GGUF_TYPES.items() if other == kind)
        writer.add_tensor(f"blk.{index}.ffn_up.weight", blocks.numpy(), raw_dtype=GGMLQuantizationType(number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_checkpoint(directory: Path, name: str, num_matrices: int) -> Path:
    """Write a checkpoint of one format; return the file with its weights."""
    if name in GGUF:
        write_gguf(directory / "model.gguf", GGUF[name], num_matrices)
        return directory / "model.gguf"
    build, config = FORMATS[name]
    tensors = {f"model.{index}.{part}": tensor for index in range(num_matrices) for part, tensor in build().items()}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}))
    return directory / "model.safetensors"


def plain(file: Path, num_matrices: int, *, is_coded: bool) -> None:
    """Read the file, and fill memory for the weights in bfloat16, or for the codes."""
    plain_read([file], NUM_THREADS, MIB)
    num_bytes = file.stat().st_size // num_matrices if is_coded else SIZE * SIZE * 2
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(lambda _: own_memory((num_bytes,), torch.uint8).fill_(1), range(num_matrices)))


def load(file: Path) -> None:
    """Read the weights, on threads."""

    def read(name: str) -> torch.Tensor:
        weight = own_memory(checkpoint.shape_of(name), torch.bfloat16)
        assert checkpoint.read_into(weight, name) or is_finite(weight)
        return weight

    path = file if file.suffix == ".gguf" else file.parent
    with open_checkpoint(path) as checkpoint, ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(read, checkpoint.names))


def load_codes(file: Path) -> None:
    """Read the codes of the weights, on threads, and pack them, as an engine does."""

    def read(name: str) -> CodedMatrix:
        return checkpoint.read_coded(name)

    path = file if file.suffix == ".gguf" else file.parent
    packed: list[CodedLinear] = []
    with open_checkpoint(path) as checkpoint:
        for _, matrix in read_ahead(checkpoint.names, read, lambda _: SIZE * SIZE, file.stat().st_size):
            packed.append(CodedLinear([Section(matrix.format, SIZE)], SIZE, SIZE))
            packed[-1].set_weight(CodedWeight((matrix,)))


def peak_mb(run: Callable[[], object]) -> float:
    """Return the most memory of its own that this process takes more while ``run`` runs, MB."""
    release_memory(CPU)
    before, highest, is_done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not is_done.wait(0.001):
            highest = max(highest, anonymous_bytes())

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        run()
        is_done.set()
        watching.result()
    return round((highest - before) / 1e6, 1)


def anonymous_bytes() -> int:
    """Return the memory of this process that is of no file."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) * 1024


def timed(run: Callable[[], object], dropped: list[Path]) -> Run:
    """Return the seconds of ``run``, after these files were dropped from the page cache."""
    release_memory(CPU)
    drop_from_page_cache(dropped)
    before, started = resource.getrusage(resource.RUSAGE_SELF), perf_counter()
    run()
    seconds, after = perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(round(seconds, 6), round(used, 6))


def results(
    names: list[str], num_matrices: int, rounds: int, *, is_coded: bool, is_cold: bool
) -> Iterator[dict[str, Any]]:
    """Yield what was measured for each format."""
    load_weights = load_codes if is_coded else load

    def read(file: Path) -> None:
        if is_cold:
            plain_read([file], 4, 4 * MIB)
        else:
            plain(file, num_matrices, is_coded=is_coded)

    for name in names:
        with tempfile.TemporaryDirectory(prefix="pg-quantised-") as temporary:
            file = write_checkpoint(Path(temporary), name, num_matrices)
            load_weights(file)  # compiles the kernels
            dropped = [file] if is_cold else []
            runs = [
                (timed(partial(read, file), dropped), timed(partial(load_weights, file), dropped))
                for _ in range(rounds)
            ]
            yield {
                "format": name,
                "gb": round(file.stat().st_size / 1e9, 3),
                "peak_mb": peak_mb(partial(load_weights, file)),
                "plain_s": statistics.median(base.seconds for base, _ in runs),
                "load_s": statistics.median(own.seconds for _, own in runs),
                "over_plain": round(statistics.median(own.seconds / base.seconds for base, own in runs), 3),
                "plain_cpu_s": statistics.median(base.cpu_seconds for base, _ in runs),
                "load_cpu_s": statistics.median(own.cpu_seconds for _, own in runs),
                "cpu_over_plain": round(statistics.median(own.cpu_seconds / base.cpu_seconds for base, own in runs), 3),
                "runs": [[asdict(item) for item in of_round] for of_round in runs],  # plain, loading
            }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write JSON to ``--out``."""
    parser = argparse.ArgumentParser(description="Loading of quantised weights beside plain reading and writing.")
    parser.add_argument("--matrices", type=int, default=17, help="of 4096 x 4096 weights")
    parser.add_argument("--codes", action="store_true", help="keep the weights as codes")
    parser.add_argument("--cold", action="store_true", help="read the files from the disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", nargs="+", choices=[*FORMATS, *GGUF], default=[*FORMATS, *GGUF])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    load_average, measured = os.getloadavg()[0], []
    columns = ("gb", "peak_mb", "plain_s", "load_s", "over_plain", "plain_cpu_s", "load_cpu_s", "cpu_over_plain")
    print(f"{'format':12}" + "".join(f"{column:>15}" for column in columns))
    formats = [name for name in options.formats if not (options.codes and name in _NOT_CODED)]
    for result in results(formats, options.matrices, options.rounds, is_coded=options.codes, is_cold=options.cold):
        measured.append(result)
        print(f"{result['format']:12}" + "".join(f"{result[column]:15.3f}" for column in columns), flush=True)
    if options.out:
        document = {"machine": describe(CPU), "load_average_before": round(load_average, 2)}
        document |= {
            "computed": "codes" if options.codes else "dequantised",
            "files": "on the disk" if options.cold else "in the page cache",
            "weights": options.matrices * SIZE * SIZE,
            "threads": NUM_THREADS,
            "results": measured,
        }
        write_result(options.out, document)


if __name__ == "__main__":
    main()
