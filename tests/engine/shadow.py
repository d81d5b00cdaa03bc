"""A runner that computes nothing but knows what every KV slot must hold.

It stands in for the ModelRunner behind the real engine, scheduler and block manager. Each slot of its cache holds the
identity of the whole prefix that was written there, so a sequence that reads a foreign, stale or unwritten slot is
found out in the step in which it happens. Its tokens depend on the whole prefix, so an answer is wrong if any read was.
"""

from __future__ import annotations

from engine.config import EngineConfig
from engine.engine import Engine, EngineInfo
from engine.metrics import MetricSink, StepTimes
from engine.scheduler import SchedulerOutput
from engine.sequence import Sequence

VOCAB_SIZE = 64


class PrefixIds:
    """Gives equal numbers to equal (salt, prefix)es, and only to those."""

    def __init__(self) -> None:
        self._ids: dict[tuple[object, int], int] = {}

    def chain(self, salt: str, token_ids: list[int]) -> list[int]:
        """Return the identity of every prefix of ``token_ids``, the shortest first."""
        parent: object = salt
        ids = []
        for token_id in token_ids:
            parent = self._ids.setdefault((parent, token_id), len(self._ids))
            ids.append(parent)
        return ids


def next_token(chain: list[int]) -> int:
    """Return the token that this "model" says after a prefix; ids are dense, so mix them."""
    return (chain[-1] * 2654435761 >> 7) % VOCAB_SIZE


class ShadowRunner:
    """Checks, step by step, that what a sequence attends to is its own prefix."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, int] = {}
        self.ids = PrefixIds()
        self.num_steps = 0

    def run(self, output: SchedulerOutput, times: StepTimes) -> list[int]:
        """Write the step's slots, then check every read, as a layer does."""
        self.num_steps += 1
        chains = [self.ids.chain(item.sequence.cache_salt, item.sequence.token_ids) for item in output.scheduled]
        written: set[int] = set()
        for item, chain in zip(output.scheduled, chains, strict=True):
            assert item.num_new_tokens >= 1, "a scheduled sequence has an empty query"
            assert item.start == item.sequence.num_computed_tokens
            for position in range(max(item.start, item.sequence.num_kv_tokens), item.end):
                slot = self.slot(item.sequence, position)
                assert slot not in written, "two tokens are written to one slot in one step"
                written.add(slot)
                self.slots[slot] = chain[position]
        for item, chain in zip(output.scheduled, chains, strict=True):
            for position in range(item.end):
                held = self.slots.get(self.slot(item.sequence, position))
                assert held == chain[position], f"{item.sequence.request_id} reads foreign KV at {position}"
        return [
            next_token(chain[: item.end]) for item, chain in zip(output.scheduled, chains, strict=True) if item.samples
        ]

    def close(self) -> None:
        """Nothing was started."""

    def slot(self, sequence: Sequence, position: int) -> int:
        """Return where the token at ``position`` lives."""
        return sequence.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def answer(self, prompt: list[int], count: int, salt: str = "") -> list[int]:
        """Return the ``count`` tokens that an undisturbed engine answers."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(next_token(self.ids.chain(salt, tokens)))
        return tokens[len(prompt) :]


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 512,
    sink: MetricSink | None = None,
    eos_token_ids: tuple[int, ...] = (),
    **options: object,
) -> tuple[Engine, ShadowRunner]:
    """Return a real engine around a shadow runner."""
    runner = ShadowRunner(block_size)
    config = EngineConfig.from_options("shadow", dict(options))
    info = EngineInfo(
        model="shadow",
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        dtype="float32",
        device="cpu",
        attention_backend="none",
        eos_token_ids=eos_token_ids,
        default_sampling={},
    )
    return Engine(config, runner, info, sink), runner


def check_integrity(engine: Engine) -> None:
    """Assert the invariants that hold between two steps."""
    scheduler = engine.scheduler
    engine.block_manager.check_integrity(scheduler.running + scheduler.waiting)
    assert scheduler.running == sorted(scheduler.running, key=lambda sequence: sequence.rank)
    assert scheduler.waiting == sorted(scheduler.waiting, key=lambda sequence: sequence.rank, reverse=True)
    assert len(scheduler.running) <= scheduler.max_num_running
    assert not any(sequence.block_table for sequence in scheduler.waiting)
    if not engine.has_unfinished:
        assert engine.block_manager.num_free_blocks == len(engine.block_manager.blocks)


def run_to_end(engine: Engine, max_steps: int = 10_000) -> dict[str, list[int]]:
    """Step until nothing is left, checking the invariants; return every request's tokens."""
    tokens: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished:
            return tokens
        for output in engine.step():
            tokens.setdefault(output.request_id, []).append(output.token_id)
        check_integrity(engine)
    raise AssertionError(f"requests are unfinished after {max_steps} steps")
