"""SMG over gRPC: as over HTTP, but its engines speak gRPC and stream KV events and loads to it.

SMG does not say when it has applied an event, so a decision waits ``APPLY_S`` of real time after events or loads were
sent. Its timers run in real time too: see ``Pace`` in side.py.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.routing.rivals import commands
from benchmarks.routing.rivals.grpc_engines import GrpcEngines
from benchmarks.routing.rivals.http_router import HttpRouter
from benchmarks.routing.rivals.side import Cluster, Events, Request, main

__all__ = ["GrpcRouter"]

APPLY_S = 0.003
SUBSCRIBE_S = 30.0
VOCABULARY = 60_000


class GrpcRouter(HttpRouter):
    """The router, its engines and its client."""

    engines: GrpcEngines

    def make_engines(self) -> GrpcEngines:
        """Return the fake engines."""
        self.folder = tempfile.TemporaryDirectory()
        _write_tokenizer(Path(self.folder.name))
        return GrpcEngines(self.cluster, self.answers, self.prompts, self.folder.name)

    def _make_publishers(self) -> None:
        return None

    @classmethod
    async def start(cls, cluster: Cluster, options: dict[str, Any]) -> HttpRouter:
        """Start engines and router, and wait for the event streams."""
        router = await super().start(cluster, options)
        deadline = time.monotonic() + SUBSCRIBE_S
        while len(router.engines.streams) < len(cluster.replicas):
            if time.monotonic() > deadline:
                await router.close()
                raise TimeoutError(f"SMG reads the events of engines {sorted(router.engines.streams)} only")
            await asyncio.sleep(0.05)
        return router

    def command(self) -> list[str]:
        """Return SMG's command line."""
        command = commands.smg(self.options, self.port, self.engines.urls)
        command += ["--block-size", str(self.cluster.block_size), "--backend", "vllm"]
        return [*command, "--model-path", self.folder.name]

    def body(self, request: Request) -> dict[str, Any]:
        """Return the body of a request to the router."""
        prompt = self.prompts.tokens(request, 8 + request.job % 80)  # below the tokens that begin blocks
        return self.engines.body(request.job, prompt, request.output_tokens)

    async def publish(self, events: Sequence[Events]) -> None:
        """Send events and loads."""
        if self.engines.publish(events):
            await asyncio.sleep(APPLY_S)

    async def close(self) -> None:
        """End the router, then the engines."""
        await super().close()
        self.folder.cleanup()


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of whole words; SMG loads one although prompts are token ids."""
    vocabulary = {"<unk>": 0, "</s>": 1} | {f"t{token}": token for token in range(2, VOCABULARY)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        **empty,
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": model,
    }
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    specials = {"eos_token": "</s>", "unk_token": "<unk>", "chat_template": template}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "eos_token_id": 1}
    for name, content in {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **specials},
        "config.json": {**config, "max_position_embeddings": 262_144},
    }.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main(GrpcRouter.start)
