"""Text that a request marks as worth keeping outlives other text, in memory and on the disk, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.errors import RequestError
from engine.kv.block_pool import MOST_SPARED
from engine.kv.tiers.disk.slot_index import SlotIndex
from engine.request import MAX_RETENTION, EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.kv.tiers.disk_engines import PROMPT, SIZE, disk_of, make, settle, tiers_of
from tests.engine.shadow import ShadowRunner, make_engine, run_to_end

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
MARKED = PROMPT[:16]
FULL = len(MARKED) // SIZE * SIZE


def ask(engine: Engine, runner: ShadowRunner, prompt: list[int], retention: int = 0) -> int:
    """Answer a prompt, check the answer, and return how many of its tokens were cached."""
    group = engine.add_request(EngineRequest("request", prompt, ONE_TOKEN, retention=retention))
    assert run_to_end(engine)["request"] == runner.answer(prompt, 1)
    if engine.tiers is not None and engine.tiers.disk is not None:
        settle(engine)
    return group.sequences[0].num_cached_tokens


def others() -> Iterator[list[int]]:
    """Yield texts of four blocks that share nothing."""
    for number in range(1000):
        yield [number % 60, number // 60, *range(14)]


def num_rounds(engine: Engine, runner: ShadowRunner, retention: int) -> int:
    """Return how many other texts it takes until memory has lost a text that was marked once."""
    ask(engine, runner, MARKED, retention)
    chain = tiers_of(engine).chain(MARKED, "")
    for number, other in enumerate(others(), 1):
        ask(engine, runner, other)
        match = engine.block_manager.prefix_cache.match(chain)
        if match.num_blocks < FULL // SIZE:
            return number
    raise AssertionError("the text is pinned")


def test_a_marked_text_outlives_others_and_is_lost_in_the_end(tmp_path: Path) -> None:
    rounds = []
    for retention in range(MAX_RETENTION + 1):
        engine, runner = make(tmp_path / str(retention), num_blocks=12, num_host_blocks=12)
        rounds.append(num_rounds(engine, runner, retention))
        engine.close()
    assert rounds == sorted(set(rounds)), "each level is kept longer"
    assert rounds[1] >= 2 * rounds[0] - 2


def test_texts_that_all_are_marked_are_lost_in_the_order_of_their_use() -> None:
    engine, runner = make_engine(block_size=SIZE, num_blocks=12, num_host_blocks=0)
    texts = [text for text, _ in zip(others(), range(4), strict=False)]
    for text in texts:
        ask(engine, runner, text, MAX_RETENTION)
    assert [ask(engine, runner, text) for text in (texts[3], texts[2])] == [15, 15]
    assert ask(engine, runner, texts[0]) < 15
    engine.close()


def test_a_marked_text_stays_on_the_disk_longer(tmp_path: Path) -> None:
    kept = []
    for retention in (0, 1):
        options = {"disk_cache_gib": 16 * 4096 / 2**30, "num_blocks": 60}
        engine, runner = make(tmp_path / str(retention), **options)
        ask(engine, runner, MARKED, retention)
        for other, _ in zip(others(), range(4), strict=False):
            ask(engine, runner, other)
        chain = tiers_of(engine).chain(MARKED, "")
        kept.append([chain.digest(index) in disk_of(engine)._indices[0] for index in range(FULL // SIZE)])
        engine.close()
    assert not any(kept[0])
    assert all(kept[1])


def test_one_choice_spares_a_limited_number_of_slots() -> None:
    names = [number.to_bytes(4, "big") for number in range(4 * MOST_SPARED)]
    index = SlotIndex(len(names))
    for number, name in enumerate(names):
        index.begin(name)
        index.commit(name, number)
    index.touch(names, retention=3)
    oldest = list(index.hashes)[MOST_SPARED]
    begun = index.begin(b"another")
    assert begun is not None
    assert begun[1] == oldest


def test_slots_are_spared_as_often_as_their_retention_says() -> None:
    index = SlotIndex(3)

    def write(number: int) -> int | None:
        begun = index.begin(bytes([number]))
        assert begun is not None
        index.commit(bytes([number]), number)
        index.check_integrity()
        return begun[1]

    assert [write(number) for number in range(3)] == [None] * 3
    index.touch([b"\0"], 2)
    index.touch([b"\0"], 1)
    assert [write(number) for number in range(3, 10)] == [1, 2, 3, 4, 5, 6, 0]
    assert index.begin(b"a") is not None
    index.check_integrity()


@pytest.mark.parametrize("retention", [-1, MAX_RETENTION + 1, True, 1.0, None])
def test_other_retentions_are_refused(retention: object) -> None:
    engine, _ = make_engine()
    with pytest.raises(RequestError, match=f"retention={retention!r} must be an integer from 0 to 3"):
        engine.add_request(EngineRequest("request", [1], retention=retention))  # type: ignore[arg-type]
    engine.close()
