"""Pages of sliding windows: how many a sequence holds, where a match resumes, and what the maps of ranks say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.engine import Engine
from engine.errors import PromptTooLongError
from engine.kv.page_maps import HostPageMap, PageMap
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from kernels.attention.window import Chunk
from tests.engine.shadow import ShadowRunner, make_engine, run_all_to_end, run_to_end

SIZE, WINDOW = 4, 8


def make(num_pages: int = 40, **options: object) -> tuple[Engine, ShadowRunner]:
    return make_engine(**{"block_size": SIZE, "windows": ((WINDOW, num_pages),), **options})  # type: ignore[arg-type]


def ask(engine: Engine, name: str, prompt: list[int], max_tokens: int = 1) -> int:
    """Answer a prompt; return how many of its tokens needed not be computed."""
    group = engine.add_request(EngineRequest(name, prompt, SamplingParams(temperature=0, max_tokens=max_tokens)))
    run_to_end(engine)
    return group.sequences[0].num_cached_tokens


def test_a_decode_holds_the_pages_within_reach_and_all_its_blocks() -> None:
    engine, _ = make(enable_prefix_caching=False)
    engine.add_request(EngineRequest("long", list(range(10)), SamplingParams(temperature=0, max_tokens=90)))
    (window,) = engine.block_manager.windows
    most = 0
    while engine.has_unfinished:
        engine.step()
        most = max(most, window.pages.counts().used)
        if engine.scheduler.running:
            (sequence,) = engine.scheduler.running
            assert len(sequence.block_table) == -(-sequence.num_computed_tokens // SIZE)
    assert most == 3  # ceil((8 - 1) / 4) + 1


def test_a_prefill_holds_those_of_its_chunk_too() -> None:
    engine, _ = make(num_pages=7, max_num_batched_tokens=16)
    ask(engine, "long", list(range(60)), max_tokens=20)
    (window,) = engine.block_manager.windows
    assert window.pages.counts().used == 0
    assert window.attached.num_evicted > 5


def test_more_sequences_fit_than_with_all_their_pages() -> None:
    engine, _ = make(num_pages=30, num_blocks=300, max_num_seqs=16)
    for index in range(8):
        prompt = [index] * 50
        engine.add_request(EngineRequest(str(index), prompt, SamplingParams(temperature=0, max_tokens=50)))
    most = 0
    while engine.has_unfinished:
        engine.step()
        most = max(most, sum(len(sequence.block_table) for sequence in engine.scheduler.running))
    assert most > 100


def test_a_prompt_that_the_pages_cannot_hold_is_rejected() -> None:
    """A window of 64 tokens has 8 pages of 4: fewer than one sequence reaches, so it must fit with all its pages."""
    engine, _ = make_engine(num_blocks=64, block_size=SIZE, windows=((64, 8),), max_num_batched_tokens=16)
    assert ask(engine, "short", list(range(31)), max_tokens=2) == 0
    for length in (32, 100):
        with pytest.raises(PromptTooLongError, match=f"has {length} tokens, but the KV cache of 'shadow' holds 32"):
            ask(engine, "long", [1] * length, max_tokens=2)


@pytest.mark.parametrize("params", [{"n": 4}, {"beam_width": 4, "temperature": 0}], ids=str)
def test_answers_whose_pages_do_not_fit_together_end_early_instead_of_failing(params: dict[str, Any]) -> None:
    engine, _ = make_engine(num_blocks=200, block_size=SIZE, windows=((16, 9),), max_num_batched_tokens=16)
    engine.add_request(EngineRequest("wide", list(range(10)), SamplingParams(max_tokens=90, **params)))
    answers = run_all_to_end(engine)
    assert len(answers) >= params.get("n", 1)
    assert all(answers.values())
    assert not engine.scheduler.has_unfinished


def test_a_match_ends_where_the_pages_within_reach_are_cached() -> None:
    engine, _ = make()
    prompt = list(range(40))
    ask(engine, "first", prompt)
    assert ask(engine, "again", prompt) == 39
    assert ask(engine, "longer", [*prompt, 41, 42]) == 40
    (window,) = engine.block_manager.windows
    for block_id in list(window.attached.by_block)[:5]:  # pages beyond reach are evicted first
        window.attached.detach(block_id)
    assert ask(engine, "at the end", prompt) == 39
    assert ask(engine, "in between", [*prompt[:18], *range(50, 60)]) == 0  # its pages are lost


def test_a_match_needs_only_what_the_next_token_reaches() -> None:
    engine, _ = make()
    prompt = list(range(21))
    ask(engine, "first", prompt)
    sequence = engine.add_request(EngineRequest("probe", prompt, SamplingParams(max_tokens=1))).sequences[0]
    engine.abort("probe")
    match = engine.block_manager.prefix_cache.match(sequence)
    blocks = match.blocks
    (window,) = engine.block_manager.windows
    assert len(blocks) == 5
    for block in blocks[:3]:  # token 20 reaches back to 13, in block 3
        window.attached.detach(block.block_id)
        assert window.num_resumable(match, 5, 20) == 5
    window.attached.detach(blocks[3].block_id)
    assert window.num_resumable(match, 5, 20) == 0


def test_a_prompt_is_hit_on_the_host_with_the_pages_within_reach_of_its_end_only() -> None:
    """Each of five prompts fills the blocks, and the pages of the window twice."""
    options = {"num_blocks": 16, "num_host_blocks": 90, "max_num_batched_tokens": 16}
    engine, runner = make(num_pages=8, num_host_window_pages=(25,), **options)
    prompts = [list(range(first, first + 60)) for first in range(5)]
    assert [ask(engine, str(index), prompt, 3) for index, prompt in enumerate(prompts)] == [0] * 5
    (window,) = engine.block_manager.windows
    assert window.attached.store.pages.counts().cached < 5 * 4, "pages are stored with which hardly a prompt resumes"
    assert [ask(engine, f"again {index}", prompt) for index, prompt in enumerate(prompts)] == [59] * 5
    assert runner.num_copied["page in"] >= 4 * 2


def test_where_prompts_part_the_second_one_leaves_pages_on_the_host_for_the_third() -> None:
    options = {"num_blocks": 16, "num_host_blocks": 90, "max_num_batched_tokens": 16}
    engine, _ = make(num_pages=8, num_host_window_pages=(25,), **options)
    system = list(range(24))
    resumed = []
    for user in (10, 30, 50):
        resumed.append(ask(engine, str(user), [*system, *range(user, user + 13)]))
        ask(engine, f"other {user}", [user, *range(5, 63)])
    assert resumed == [0, 0, 24]


def test_a_decode_holds_the_pages_of_its_chunk_alone() -> None:
    engine, _ = make(windows=((Chunk(12), 40),), enable_prefix_caching=False)
    engine.add_request(EngineRequest("long", list(range(10)), SamplingParams(temperature=0, max_tokens=90)))
    (window,) = engine.block_manager.windows
    while engine.has_unfinished:
        engine.step()
        for sequence in engine.scheduler.running:
            computed = sequence.num_computed_tokens
            assert window.pages.counts().used == -(-computed // SIZE) - (computed - 1) // 12 * 3


def test_a_match_needs_only_the_pages_since_the_chunk_of_the_next_token_began() -> None:
    engine, _ = make(windows=((Chunk(12), 40),))
    prompt = list(range(40))
    ask(engine, "first", prompt)
    sequence = engine.add_request(EngineRequest("probe", prompt, SamplingParams(max_tokens=1))).sequences[0]
    engine.abort("probe")
    match = engine.block_manager.prefix_cache.match(sequence)
    (window,) = engine.block_manager.windows
    for block in match.blocks[:9]:  # token 39 is in the chunk from 36 on, which is block 9
        window.attached.detach(block.block_id)
    assert window.num_resumable(match, 10, 39) == 10
    window.attached.detach(match.blocks[9].block_id)
    assert window.num_resumable(match, 10, 39) == 9  # the chunk from 36 on begins without any
    assert window.num_resumable(match, 8, 39) == 6  # and so does that from 24 on
    assert ask(engine, "again", prompt) == 36


def test_pages_of_a_chunk_that_begins_within_a_block() -> None:
    engine, _ = make(windows=((Chunk(10), 40),))
    prompt = list(range(40))
    ask(engine, "first", prompt)
    (window,) = engine.block_manager.windows
    sequence = engine.add_request(EngineRequest("probe", prompt, SamplingParams(max_tokens=1))).sequences[0]
    engine.abort("probe")
    match = engine.block_manager.prefix_cache.match(sequence)
    for block in match.blocks[:7]:  # token 39 is in the chunk from 30 on, which begins in block 7
        window.attached.detach(block.block_id)
    assert window.num_resumable(match, 10, 39) == 10
    window.attached.detach(match.blocks[7].block_id)
    assert window.num_resumable(match, 10, 39) == 5  # only that from 20 on begins with a block


def test_maps_turn_blocks_into_pages() -> None:
    host, device = HostPageMap(6), PageMap(6, torch.device("cpu"))
    changes = host.update(np.array([1, 4]), np.array([7, 2], dtype=np.int32))
    device.write(*map(torch.from_numpy, changes))
    assert device.look_up(torch.tensor([[4, 1, -1]], dtype=torch.int32)).tolist() == [[2, 7, -1]]
    assert host.slots(np.array([4 * SIZE + 3, SIZE, -1]), SIZE).tolist() == [2 * SIZE + 3, 7 * SIZE, -1]


def test_a_map_is_sent_whole_after_changes_were_lost() -> None:
    host, device = HostPageMap(6), PageMap(6, torch.device("cpu"))
    host.update(np.array([1]), np.array([7], dtype=np.int32))
    host.forget()
    device.write(*map(torch.from_numpy, host.update(np.array([4]), np.array([2], dtype=np.int32))))
    assert device.look_up(torch.arange(6, dtype=torch.int32)[None]).tolist() == [[-1, 7, -1, -1, 2, -1]]
    blocks, _ = host.update(np.array([0]), np.array([3], dtype=np.int32))
    assert blocks.tolist() == [0]
