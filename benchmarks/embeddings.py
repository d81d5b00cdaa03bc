"""Texts per second of embeddings on a CPU, beside a loop as sentence-transformers' ``encode``, in the same run.

    python -m benchmarks.embeddings --out benchmarks/results/embeddings.json

Checkpoints have the shapes of all-MiniLM-L6-v2 (22M parameters) and BERT base (110M) with random weights, on which
speed does not depend. The other way is transformers' model with padded batches of 32 texts of 2,000 that are sorted by
length, mean pooling and normalisation, on as many threads. Both get token ids, so that no tokenizer is measured. The
ways alternate batch by batch, so that both see the same disturbances of a shared machine; the times are added up.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModel, BertConfig

from benchmarks.machine import describe
from benchmarks.result_file import write_result
from engine.config import EngineConfig
from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine
from engine.pooling.params import PoolingParams
from engine.request import EngineRequest
from kernels.cgroup import available_cpus

__all__ = ["SHAPES", "main", "measure"]

SHAPES: dict[str, dict[str, int]] = {
    "minilm-22m": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
    "bert-110m": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
}
SHORTEST, LONGEST = 20, 400  # tokens of a text
FIRST_WORD = 1000  # of BERT's vocabulary; the ids before it are special
BATCH = 32
NUM_TEXTS = 2000

Texts = Sequence[list[int]]
Way = Callable[[Texts], torch.Tensor]


def main() -> None:
    """Print a line for each shape, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["minilm-22m", "bert-110m"])
    parser.add_argument("--batches", type=int, help="a random part of the batches of each way; default: all")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the engine")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    records = []
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as directory:
            record = measure(shape, Path(directory), arguments.batches, arguments.threads, arguments.dtype)
        records.append(record)
        print(record, flush=True)
        if arguments.out is not None:
            machine = describe(torch.device("cpu"))
            document = {"machine": machine, "threads": arguments.threads, "shapes": records}
            write_result(arguments.out, document)


def measure(
    shape: str, directory: Path, num_batches: int | None, threads: int, dtype: str = "float32"
) -> dict[str, Any]:
    """Return the figures of one shape.

    Args:
        shape: of SHAPES.
        directory: for the checkpoint.
        num_batches: of how many each way computes the texts; None: of all.
        threads: that compute.
        dtype: of the engine; the other way's is float32.
    """
    _write_checkpoint(directory, SHAPES[shape])
    batches = _batches(num_batches)
    num_texts = sum(map(len, batches))
    ways: dict[str, Way] = {"engine": _engine(directory, threads, dtype), "padded": _padded(directory)}
    warm_up = {name: way(batches[0][:4]) for name, way in ways.items()}
    seconds, cpu_seconds = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    difference = float((warm_up["engine"] - warm_up["padded"]).abs().max())
    for number, batch in enumerate(batches):
        vectors = {}
        for name in (list(ways), list(ways)[::-1])[number % 2]:
            torch.set_num_threads(1 if name == "engine" else threads)  # as the engine has set it
            started, cpu_started = perf_counter(), process_time()
            vectors[name] = ways[name](batch)
            seconds[name] += perf_counter() - started
            cpu_seconds[name] += process_time() - cpu_started
        difference = max(difference, float((vectors["engine"] - vectors["padded"]).abs().max()))
    return {
        "shape": shape,
        "dtype": dtype,
        "num_texts": num_texts,
        "mean_tokens": round(sum(len(text) for batch in batches for text in batch) / num_texts, 1),
        "texts_per_s": {name: round(num_texts / taken, 2) for name, taken in seconds.items()},
        "cpu_seconds": {name: round(taken, 1) for name, taken in cpu_seconds.items()},
        "speedup": round(seconds["padded"] / seconds["engine"], 2),
        "cpu_speedup": round(cpu_seconds["padded"] / cpu_seconds["engine"], 2),
        "largest_difference": float(f"{difference:.1e}"),
    }


def _write_checkpoint(directory: Path, shape: dict[str, int]) -> None:
    torch.manual_seed(0)
    AutoModel.from_config(BertConfig(**shape)).save_pretrained(directory)


def _batches(number: int | None) -> list[Texts]:
    """Return batches of texts of similar lengths, in random order."""
    rng = random.Random(0)
    vocab_size = BertConfig().vocab_size
    lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(NUM_TEXTS)]
    lengths.sort(reverse=True)
    texts = [[rng.randrange(FIRST_WORD, vocab_size) for _ in range(length)] for length in lengths]
    batches = [texts[start : start + BATCH] for start in range(0, NUM_TEXTS, BATCH)]
    return rng.sample(batches, number or len(batches))


def _engine(directory: Path, threads: int, dtype: str) -> Way:
    from engine.pooling.runner import PoolingRunner

    config = EngineConfig(model=str(directory), device="cpu", num_threads=threads, dtype=dtype)
    pooling = PoolingConfig(task="embed", pooling_type="mean", normalize=True)
    engine = PoolingEngine(config, PoolingRunner(config, pooling))

    def run(texts: Texts) -> torch.Tensor:
        ids = [uuid.uuid4().hex for _ in texts]
        for request_id, text in zip(ids, texts, strict=True):
            engine.queue_request(EngineRequest(request_id, text, pooling=PoolingParams()))
        results: dict[str, bytes] = {}
        while engine.has_unfinished:
            results |= {output.request_id: output.pooled or b"" for output in engine.step()}
        return torch.tensor(np.stack([np.frombuffer(results[request_id], "<f4") for request_id in ids]))

    return run


def _padded(directory: Path) -> Way:
    model = AutoModel.from_pretrained(directory, attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def run(texts: Texts) -> torch.Tensor:
        longest = max(map(len, texts))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
        hidden = model(input_ids=ids, attention_mask=mask)[0]
        kept = mask[..., None].float()
        return F.normalize((hidden * kept).sum(dim=1) / kept.sum(dim=1), dim=1)

    return run


if __name__ == "__main__":
    main()
