"""vLLM's OpenAI server on this machine: `PYTHON -m vllm.entrypoints.openai.api_server`, PYTHON being one with vLLM."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.serving.measures import MODEL_NAME
from deployments.launcher.direct import direct_urlopen

__all__ = ["command", "vllm_server"]

START_TIMEOUT_S = 600.0  # it compiles the model
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}


def command(python: str, model: str, port: int, max_num_seqs: int, max_model_len: int) -> list[str]:
    """Return the command of a server with our sizes; all else is vLLM's default."""
    return [
        python,
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)),
        *("--max-num-seqs", str(max_num_seqs), "--max-model-len", str(max_model_len)),
    ]


@contextmanager
def vllm_server(python: str, model: str, *, max_num_seqs: int, max_model_len: int) -> Iterator[str]:
    """Run vLLM's server while the block runs; yields its URL.

    Raises:
        RuntimeError: if it does not start; the message has the end of its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="pg-vllm") as directory:
        log = Path(directory) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(python, model, port, max_num_seqs, max_model_len),
                cwd=directory,
                env=os.environ | SETTINGS,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            _wait(process, f"http://127.0.0.1:{port}/health", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=60)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(url):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"vLLM's server did not start:\n{log.read_text(encoding='utf-8')[-4000:]}")
        time.sleep(0.5)


def _answers(url: str) -> bool:
    try:
        with direct_urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
