"""Admission: which waiting requests start, and which requests the engine rejects at once."""

from __future__ import annotations

import pytest

from engine.errors import PromptTooLongError, RequestError
from engine.kv.prefix_cache import PrefixCache, PrefixMatch
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.engine.kv.test_block_manager import set_hash
from tests.engine.scheduling.steps import add, make_step, step_sizes
from tests.engine.shadow import make_engine, run_all_to_end, run_to_end


def test_prefills_that_cannot_all_fit_do_not_thrash() -> None:
    """If their first chunk were enough to start, long prompts would preempt each other again and again."""
    engine, _ = make_engine(
        num_blocks=100, block_size=16, max_model_len=1600, max_num_batched_tokens=128, enable_prefix_caching=False
    )
    for i in range(6):
        add(engine, str(i), 1000, first=i)
    computed = 0
    while engine.has_unfinished:
        computed += sum(step_sizes(engine).values())
    assert computed == 6 * 1003


def test_a_group_starts_only_when_there_is_a_slot_for_each_of_its_sequences() -> None:
    engine, _ = make_engine(max_num_seqs=4)
    add(engine, "first", 4, max_tokens=3)
    engine.add_request(EngineRequest("group", [7, 8, 9], SamplingParams(n=4, max_tokens=6)))
    assert [make_step(engine)[0] for _ in range(4)] == [["first"]] * 3 + [["group"]]
    assert make_step(engine)[0] == ["group"] * 4


def test_a_blocked_request_is_tried_again_when_the_blocks_that_it_shares_are_computed() -> None:
    engine, _ = make_engine(num_blocks=14, block_size=4, long_prefill_threshold=20)
    for name in ("first", "second"):
        engine.add_request(EngineRequest(name, [i % 64 for i in range(38)], SamplingParams(max_tokens=10)))
    steps = 0
    while len(engine.scheduler.running) < 2:
        engine.step()
        steps += 1
    assert steps == 2


def test_a_blocked_request_is_tried_again_when_a_cached_block_that_it_shares_comes_into_use() -> None:
    """A block in use takes over what an unused one holds; a request that shares it then needs one free block less."""
    engine, _ = make_engine(num_blocks=6, block_size=4, long_prefill_threshold=4)
    shared = list(range(8))
    engine.add_request(EngineRequest("old", shared, SamplingParams(max_tokens=1)))
    run_to_end(engine)
    computes_again = SamplingParams(prompt_logprobs=1, max_tokens=4)  # without the cache, one block a step
    engine.add_request(EngineRequest("running", [*shared, 8, 9], computes_again))
    engine.add_request(EngineRequest("blocked", [*shared, *range(20, 29)], SamplingParams(max_tokens=2)))
    assert [make_step(engine)[0] for _ in range(2)] == [["running"], ["running", "blocked"]]


@pytest.fixture
def matches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The request ids of all matches of prefixes so far."""
    made: list[str] = []
    match = PrefixCache.match

    def recording(cache: PrefixCache, sequence: Sequence) -> PrefixMatch:
        made.append(sequence.request_id)
        return match(cache, sequence)

    monkeypatch.setattr(PrefixCache, "match", recording)
    return made


def test_a_request_that_waits_for_pages_of_a_window_is_not_matched_in_each_step(matches: list[str]) -> None:
    """Its first chunk needs pages too; the running request frees some in each step, and takes others."""
    engine, _ = make_engine(block_size=4, windows=((8, 11),), max_num_batched_tokens=32)
    add(engine, "running", 9, max_tokens=30)
    engine.step()
    add(engine, "waiting", 80, max_tokens=2, first=7)
    matches.clear()
    for _ in range(20):
        assert list(step_sizes(engine)) == ["running"]
    assert not matches
    run_to_end(engine)
    assert matches


def test_a_blocked_request_is_not_matched_in_each_step_because_other_content_has_its_hash(
    monkeypatch: pytest.MonkeyPatch, matches: list[str]
) -> None:
    set_hash(monkeypatch, lambda packed: 42)
    engine, _ = make_engine(num_blocks=10, block_size=16, max_model_len=160)
    add(engine, "running", 129, max_tokens=12)
    engine.step()
    add(engine, "waiting", 100, max_tokens=2, first=7)
    for _ in range(8):
        assert list(step_sizes(engine)) == ["running"]
    assert matches.count("waiting") == 2  # when it did not fit, and for the hash that it awaits
    run_to_end(engine)


@pytest.mark.parametrize(("length", "starts"), [(98 * 4, True), (99 * 4, False)])
def test_a_request_that_would_leave_less_than_the_watermark_free_waits(length: int, starts: bool) -> None:
    """Of 200 blocks the first one has 99 and needs another; one in a hundred stays free."""
    engine, _ = make_engine(num_blocks=200, block_size=4, max_model_len=900, enable_prefix_caching=False)
    add(engine, "first", 99 * 4)
    add(engine, "second", length, first=1)
    assert make_step(engine)[0] == (["first", "second"] if starts else ["first"])


def test_a_prompt_larger_than_the_pool_is_rejected_and_the_engine_lives() -> None:
    engine, runner = make_engine(num_blocks=4, block_size=4, max_model_len=100)
    with pytest.raises(PromptTooLongError, match="17 tokens.*holds 16.*at least 2"):
        add(engine, "big", 17)
    add(engine, "small", 5, max_tokens=3)
    assert run_to_end(engine)["small"] == runner.answer(list(range(5)), 3)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([64], "64.*0..63"), ([-1], "-1"), ([True], "True"), (["a"], "'a'")],
)
def test_bad_prompts_are_rejected(prompt: list[int], message: str) -> None:
    engine, _ = make_engine()
    with pytest.raises(RequestError, match=message):
        engine.add_request(EngineRequest("bad", prompt, SamplingParams()))
    assert not engine.has_unfinished


def test_a_request_id_in_use_is_rejected() -> None:
    engine, _ = make_engine()
    add(engine, "a", 3)
    with pytest.raises(RequestError, match="'a' is in use"):
        add(engine, "a", 3)
    run_to_end(engine)
    add(engine, "a", 3)  # and free again once it has ended


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(n=5), "n"),
        (SamplingParams(n=2, best_of=5), "best_of"),
        (SamplingParams(temperature=0, beam_width=5), "beam_width"),
    ],
)
def test_a_group_that_can_never_run_is_rejected_by_the_parameter_that_makes_it_wide(
    params: SamplingParams, name: str
) -> None:
    engine, _ = make_engine(max_num_seqs=4)
    with pytest.raises(RequestError, match=f"{name}=5 exceeds the 4 sequences") as too_many:
        engine.add_request(EngineRequest("a", [1], params))
    assert too_many.value.param == name
    engine, _ = make_engine(num_blocks=4, block_size=2)
    with pytest.raises(RequestError, match=f"{name}=5 answers .* 5 tokens do not fit") as too_large:
        engine.add_request(EngineRequest("a", [1, 2, 3, 4, 5], params))
    assert too_large.value.param == name
    assert not engine.has_unfinished


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_host_blocks", [0, 8])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("with_beams", [True, False])
def test_a_group_alone_in_a_small_pool_fills_it_and_ends(
    width: int, with_beams: bool, caching: bool, num_host_blocks: int
) -> None:
    """Every small pool and prompt: the request is rejected, or runs to its limit without a preemption."""
    params = (
        SamplingParams(temperature=0, beam_width=width, n=width, max_tokens=None)
        if with_beams
        else SamplingParams(n=width, max_tokens=None)
    )
    for block_size in (1, 2, 3):
        for num_blocks in range(1, 10):
            for length in range(1, num_blocks * block_size):
                engine, _ = make_engine(
                    num_blocks=num_blocks,
                    block_size=block_size,
                    num_host_blocks=num_host_blocks,
                    enable_prefix_caching=caching,
                )
                try:
                    group = engine.add_request(EngineRequest("a", [i % 2 for i in range(length)], params))
                except RequestError:
                    continue
                answers = run_all_to_end(engine, max_steps=60)
                assert [len(answers["a", index]) for index in range(width)] == [group.max_total_tokens - length] * width
                assert group.num_preemptions == 0
