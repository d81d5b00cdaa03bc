"""Scheduling policy, seen through the real engine with a shadow runner behind it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from engine.engine import Engine
from engine.errors import PromptTooLongError, RequestError
from engine.outputs import EngineOutput, FinishReason
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.step import SampledTokens, SchedulerOutput, StepTimes
from engine.scheduling.step_outputs import step_outputs
from engine.sequence import SequenceStatus
from tests.engine.shadow import check_integrity, make_engine, run_all_to_end, run_to_end


def add(engine: Engine, request_id: str, length: int, max_tokens: int = 4, first: int = 0, priority: int = 0) -> None:
    prompt = [(first + i) % 64 for i in range(length)]
    engine.add_request(EngineRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens), priority=priority))


def step_sizes(engine: Engine) -> dict[str, int]:
    """Schedule one step and return how many tokens each request computes in it."""
    output = engine.scheduler.schedule()
    engine.scheduler.update(output, engine.runner.run(output, None))  # type: ignore[arg-type]
    return {one.request_id: count for one, count in zip(output.sequences, output.num_new_tokens, strict=True)}


def test_a_long_prompt_is_chunked_to_the_budget() -> None:
    engine, _ = make_engine(max_num_batched_tokens=16)
    add(engine, "long", 40)
    assert [step_sizes(engine)["long"] for _ in range(4)] == [16, 16, 8, 1]


def test_a_step_mixes_decodes_with_a_prefill_chunk() -> None:
    engine, _ = make_engine(max_num_batched_tokens=16)
    add(engine, "short", 4, max_tokens=20)
    step_sizes(engine)
    add(engine, "long", 40, first=30)
    assert step_sizes(engine) == {"short": 1, "long": 15}


def test_sustained_prefill_does_not_starve_decode() -> None:
    engine, _ = make_engine(max_num_batched_tokens=8, num_blocks=512)
    add(engine, "decoding", 4, max_tokens=40)
    step_sizes(engine)
    for i in range(20):
        add(engine, f"long{i}", 60, first=i)
        assert step_sizes(engine)["decoding"] == 1


def test_a_crowd_of_decodes_does_not_starve_a_prefill() -> None:
    engine, _ = make_engine(max_num_batched_tokens=8, num_blocks=512)
    for i in range(7):
        add(engine, f"decoding{i}", 1, max_tokens=100, first=i)
    step_sizes(engine)
    add(engine, "long", 30, first=20)
    for i in range(20):
        add(engine, f"later{i}", 1, max_tokens=100, first=i)
        assert step_sizes(engine)["long"] >= 1


def test_budget_and_places_are_kept() -> None:
    engine, _ = make_engine(max_num_batched_tokens=32, max_num_seqs=3)
    for i in range(10):
        add(engine, str(i), 20, first=i)
    while engine.has_unfinished:
        sizes = step_sizes(engine)
        assert sum(sizes.values()) <= 32
        assert len(sizes) <= 3


def test_higher_priority_goes_first_and_equals_in_order_of_arrival() -> None:
    engine, _ = make_engine(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 0), ("urgent", 5), ("idle", -5)):
        add(engine, name, 4, priority=priority)
    assert list(run_to_end(engine)) == ["urgent", "a", "b", "idle"]


def test_the_lowest_priority_then_the_latest_arrival_is_preempted() -> None:
    engine, _ = make_engine(num_blocks=6, block_size=4, enable_prefix_caching=False)
    add(engine, "low", 7, max_tokens=8, priority=-1)
    add(engine, "early", 7, max_tokens=8, first=10)
    add(engine, "late", 7, max_tokens=8, first=20)
    preempted: list[str] = []
    while engine.has_unfinished:
        output = engine.scheduler.schedule()
        preempted += [sequence.request_id for sequence in output.preempted]
        engine.scheduler.update(output, engine.runner.run(output, None))  # type: ignore[arg-type]
        check_integrity(engine)
    assert preempted[0] == "low"
    assert "early" not in preempted


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_loses_no_token_and_recomputes_at_the_right_positions(caching: bool) -> None:
    engine, runner = make_engine(num_blocks=8, block_size=4, enable_prefix_caching=caching)
    for i in range(4):
        add(engine, str(i), 9, max_tokens=20, first=i)
    answers = run_to_end(engine)
    for i in range(4):
        assert answers[str(i)] == runner.answer([(i + j) % 64 for j in range(9)], 20)


def test_a_prompt_larger_than_the_pool_is_refused_and_the_engine_lives() -> None:
    engine, runner = make_engine(num_blocks=4, block_size=4, max_model_len=100)
    with pytest.raises(PromptTooLongError, match="17 tokens.*holds 16.*at least 2"):
        add(engine, "big", 17)
    add(engine, "small", 5, max_tokens=3)
    assert run_to_end(engine)["small"] == runner.answer(list(range(5)), 3)


def test_a_sequence_that_outgrows_the_pool_ends_with_reason_length() -> None:
    engine, _ = make_engine(num_blocks=4, block_size=4, max_model_len=100)
    add(engine, "grows", 10, max_tokens=90)
    outputs: list[EngineOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert len(outputs) == 6  # 10 + 6 = 16 tokens


def test_the_context_ends_an_answer_with_reason_length() -> None:
    engine, _ = make_engine(max_model_len=12)
    engine.add_request(EngineRequest("a", [1] * 10, SamplingParams(max_tokens=None)))
    assert len(run_to_end(engine)["a"]) == 2


def test_an_eos_id_ends_the_answer_unless_ignored_or_too_early() -> None:
    prompt = [3, 1, 4]
    plain = make_engine()[1].answer(prompt, 10)
    eos = plain[4]
    expected_end = plain.index(eos) + 1
    engine, _ = make_engine(eos_token_ids=(eos,))
    engine.add_request(EngineRequest("stops", prompt, SamplingParams(max_tokens=10)))
    assert run_to_end(engine)["stops"] == plain[:expected_end]
    engine.add_request(EngineRequest("ignores", prompt, SamplingParams(max_tokens=10, ignore_eos=True)))
    assert run_to_end(engine)["ignores"] == plain


def test_stop_token_ids_say_which_one_stopped() -> None:
    prompt = [3, 1, 4]
    plain = make_engine()[1].answer(prompt, 10)
    engine, _ = make_engine()
    engine.add_request(EngineRequest("a", prompt, SamplingParams(max_tokens=10, stop_token_ids=[plain[2]])))
    outputs: list[EngineOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert outputs[-1].stop_reason == plain[2]
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_generated_blocks_are_cached_too() -> None:
    """The second turn of a conversation hits the first turn's answer."""
    engine, _ = make_engine(block_size=4)
    add(engine, "first", 8, max_tokens=9)
    answer = run_to_end(engine)["first"]
    group = engine.add_request(EngineRequest("second", [*range(8), *answer, 1, 2, 3], SamplingParams(max_tokens=1)))
    run_to_end(engine)
    assert group.sequences[0].num_cached_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([64], "64.*0..63"), ([-1], "-1"), ([True], "True"), (["a"], "'a'")],
)
def test_bad_prompts_are_refused(prompt: list[int], message: str) -> None:
    engine, _ = make_engine()
    with pytest.raises(RequestError, match=message):
        engine.add_request(EngineRequest("bad", prompt, SamplingParams()))
    assert not engine.has_unfinished


def test_a_request_id_in_use_is_refused() -> None:
    engine, _ = make_engine()
    add(engine, "a", 3)
    with pytest.raises(RequestError, match="'a' is in use"):
        add(engine, "a", 3)
    run_to_end(engine)
    add(engine, "a", 3)  # and free again once it has ended


def test_prefills_that_cannot_all_fit_do_not_thrash() -> None:
    """Admitted by their first chunk only, long prompts would throw each other out again and again."""
    engine, _ = make_engine(
        num_blocks=100, block_size=16, max_model_len=1600, max_num_batched_tokens=128, enable_prefix_caching=False
    )
    for i in range(6):
        add(engine, str(i), 1000, first=i)
    computed = 0
    while engine.has_unfinished:
        computed += sum(step_sizes(engine).values())
    assert computed == 6 * 1003


def test_a_stop_token_is_obeyed_from_the_first_place_behind_min_tokens() -> None:
    prompt = [3, 1, 4]
    plain = make_engine()[1].answer(prompt, 10)
    stop = plain[3]
    assert stop not in plain[:3]
    for min_tokens, length in ((0, 4), (3, 4)):
        engine, _ = make_engine()
        params = SamplingParams(max_tokens=10, min_tokens=min_tokens, stop_token_ids=[stop])
        engine.add_request(EngineRequest("a", prompt, params))
        assert len(run_to_end(engine)["a"]) == length
    engine, _ = make_engine()  # the fake model ignores the sampler's mask, so the token comes, and is no end
    engine.add_request(EngineRequest("a", prompt, SamplingParams(max_tokens=10, min_tokens=4, stop_token_ids=[stop])))
    assert len(run_to_end(engine)["a"]) > 4


def test_an_answer_goes_on_behind_tokens_that_were_generated_elsewhere() -> None:
    """A request that lost its replica: lengths and limits count what it has had already."""
    engine, runner = make_engine()
    prompt = [3, 1, 4]
    plain = runner.answer(prompt, 10)
    params = SamplingParams(max_tokens=10, min_tokens=6, stop_token_ids=[plain[7]])
    group = engine.queue_request(EngineRequest("whole", prompt, params))
    whole = run_to_end(engine)["whole"]
    assert group.sequences[0].stop_reason == plain[7]
    engine.check_request(EngineRequest("a", prompt, params, output_token_ids=whole[:5]))
    engine.queue_request(EngineRequest("rest", prompt, params, output_token_ids=whole[:5]))
    assert run_to_end(engine)["rest"] == whole[5:]
    with pytest.raises(RequestError, match="max_tokens=5"):
        engine.check_request(EngineRequest("a", prompt, SamplingParams(max_tokens=5), output_token_ids=whole[:5]))
    with pytest.raises(RequestError, match="one answer"):
        engine.check_request(EngineRequest("a", prompt, SamplingParams(n=2), output_token_ids=whole[:5]))
    with pytest.raises(RequestError, match="output has the id 99"):
        engine.check_request(EngineRequest("a", prompt, params, output_token_ids=[99]))


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_beam_without_a_token_to_go_on_with_ends_its_search_and_nothing_else(steps_before: int) -> None:
    """One NaN in one beam's logits took the whole engine with it."""
    engine, runner = make_engine()
    engine.add_request(
        EngineRequest("beams", [1, 2, 3], SamplingParams(temperature=0, beam_width=3, n=2, max_tokens=9))
    )
    add(engine, "other", 5, max_tokens=9)
    outputs = [output for _ in range(steps_before) for output in engine.step()]
    compute = runner.run

    def spoil(output: SchedulerOutput, times: StepTimes) -> SampledTokens:
        sampled = compute(output, times)
        sampled.failed[min(sampled.beams)] = "the logits hold a NaN"
        return sampled

    runner.run = spoil  # type: ignore[method-assign]
    outputs += engine.step()
    check_integrity(engine)
    runner.run = compute  # type: ignore[method-assign]
    failed = [output for output in outputs if output.request_id == "beams"]
    assert [(one.index, one.token_ids, one.finish_reason, one.is_last) for one in failed] == [
        (0, [], FinishReason.ABORT, False),
        (1, [], FinishReason.ABORT, True),
    ]
    assert {one.stop_reason for one in failed} == {"the logits hold a NaN"}
    answer = [token_id for output in outputs if output.request_id == "other" for token_id in output.token_ids]
    assert answer + run_to_end(engine)["other"] == runner.answer(list(range(5)), 9)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0, beam_width=3, max_tokens=9), SamplingParams(n=1, best_of=3, max_tokens=9)],
)
def test_answers_that_are_held_back_cannot_be_ended_from_outside(params: SamplingParams) -> None:
    """A search that lost a beam took the whole engine with it, and the best answer of several was never told."""
    engine, _ = make_engine()
    engine.add_request(EngineRequest("a", [1, 2, 3], params))
    engine.step()
    engine.step()
    for index in range(3):
        assert not engine.end_sequence("a", index)
    assert len(run_to_end(engine)["a"]) == 9


def test_ending_an_answer_before_there_are_several_ends_none_of_them() -> None:
    """Ending answer 0 ended all, without a word to whoever waited for them; ending another did nothing."""
    engine, _ = make_engine(max_num_batched_tokens=4)
    group = engine.add_request(EngineRequest("a", list(range(6)), SamplingParams(n=3, max_tokens=5)))
    while not group.is_forked:  # in the queue, and in the middle of the prompt
        for index in range(3):
            assert not engine.end_sequence("a", index)
        engine.step()
    assert engine.end_sequence("a", 1)
    answers = run_all_to_end(engine)
    assert {index: len(tokens) for (_, index), tokens in answers.items()} == {0: 4, 2: 4}


# --- groups ---------------------------------------------------------------------------------------------------------


def test_a_long_prefill_leaves_the_budget_to_others() -> None:
    engine, _ = make_engine(max_num_batched_tokens=32, long_prefill_threshold=8)
    add(engine, "long", 40)
    add(engine, "short", 6, first=50)
    assert step_sizes(engine) == {"long": 8, "short": 6}
    assert step_sizes(engine) == {"long": 8, "short": 1}


def rows(engine: Engine) -> tuple[list[str], SchedulerOutput]:
    """Make one step; return which request each row belongs to, and the step."""
    output = engine.scheduler.schedule()
    engine.scheduler.update(output, engine.runner.run(output, None))  # type: ignore[arg-type]
    check_integrity(engine)
    return [one.request_id for one in output.sequences], output


def test_a_group_is_admitted_only_when_all_its_sequences_find_a_place() -> None:
    engine, _ = make_engine(max_num_seqs=4)
    add(engine, "first", 4, max_tokens=3)
    engine.add_request(EngineRequest("group", [7, 8, 9], SamplingParams(n=4, max_tokens=6)))
    assert [rows(engine)[0] for _ in range(4)] == [["first"]] * 3 + [["group"]]
    assert rows(engine)[0] == ["group"] * 4


def test_groups_run_by_priority_and_each_as_a_whole() -> None:
    engine, _ = make_engine(max_num_seqs=5)
    engine.add_request(EngineRequest("low", [1, 2], SamplingParams(n=2, max_tokens=9), priority=-1))
    rows(engine)
    engine.add_request(EngineRequest("high", [3, 4], SamplingParams(n=3, max_tokens=9), priority=1))
    rows(engine)
    assert rows(engine)[0] == ["high"] * 3 + ["low"] * 2


@pytest.mark.parametrize("num_host_blocks", [20, 2, 0])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "params", [SamplingParams(n=3, max_tokens=12), SamplingParams(temperature=0, beam_width=3, n=3, max_tokens=12)]
)
def test_a_group_gives_way_and_comes_back_as_a_whole(
    params: SamplingParams, caching: bool, num_host_blocks: int
) -> None:
    """To the host while that has room for all of it, else to be computed again."""
    engine, runner = make_engine(
        num_blocks=16, num_host_blocks=num_host_blocks, block_size=2, enable_prefix_caching=caching
    )
    add(engine, "first", 7, max_tokens=24)
    group = engine.add_request(EngineRequest("group", [60, 61, 62], params))
    preempted = []
    told: dict[int, list[int]] = {}
    while engine.has_unfinished:
        output = engine.scheduler.schedule()
        preempted += [(one, one.status, len(output.swap_out)) for one in output.preempted]
        got_token = engine.scheduler.update(output, runner.run(output, None))  # type: ignore[arg-type]
        for one in step_outputs(got_token):
            if one.request_id == "group":
                told.setdefault(one.index, []).extend(one.token_ids)
        check_integrity(engine)
    assert {one for one, _, _ in preempted} == {group}
    for _, status, num_swapped in preempted:
        assert status is (SequenceStatus.SWAPPED if num_swapped else SequenceStatus.WAITING)
        assert bool(num_swapped) == (num_host_blocks == 20)
    if group.beams is None:
        count = group.max_total_tokens - 3
        assert told == {index: runner.answer([60, 61, 62], count, index=index) for index in range(3)}
    else:
        found = runner.search([60, 61, 62], params, group.max_total_tokens)
        assert told == {index: found[index].token_ids for index in range(3)}


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(n=5), "n"),
        (SamplingParams(n=2, best_of=5), "best_of"),
        (SamplingParams(temperature=0, beam_width=5), "beam_width"),
    ],
)
def test_a_group_that_can_never_run_is_refused_by_the_parameter_that_makes_it_wide(
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
    """Every small pool and prompt: either refused at the door, or it runs to its limit, without giving way."""
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


def test_a_request_that_found_no_room_is_tried_again_when_what_it_shares_is_computed() -> None:
    engine, _ = make_engine(num_blocks=14, block_size=4, long_prefill_threshold=20)
    for name in ("first", "second"):
        engine.add_request(EngineRequest(name, [i % 64 for i in range(38)], SamplingParams(max_tokens=10)))
    steps = 0
    while len(engine.scheduler.running) < 2:
        engine.step()
        steps += 1
    assert steps == 2


def test_the_log_says_what_sharing_saved(caplog: pytest.LogCaptureFixture) -> None:
    """A prompt of 16 tokens and two answers of 4, in blocks of 4: both hold 5, of which 4 are the same."""
    caplog.set_level(logging.INFO, logger="engine.observability.sharing_log")
    engine, _ = make_engine(block_size=4)
    engine.add_request(EngineRequest("two", list(range(16)), SamplingParams(n=2, max_tokens=4)))
    add(engine, "one", 16)
    run_to_end(engine)
    assert [record.getMessage() for record in caplog.records] == [
        "request two: sharing saved 4 of the 10 KV blocks of its answers (40%)"
    ]


# --- prefills beside decodes ----------------------------------------------------------------------------------------


def paced_engine(slowdown: float = 1.5, **options: Any) -> Engine:
    """An engine on a machine where a step computes 10 tokens in the time of one."""
    return make_engine(num_blocks=600, free_tokens=10, max_decode_slowdown=slowdown, **options)[0]


def test_a_long_prompt_beside_decodes_is_cut_so_that_they_hardly_wait() -> None:
    engine = paced_engine()
    add(engine, "decoding", 4, max_tokens=30)
    step_sizes(engine)
    add(engine, "long", 100, first=30)
    assert [step_sizes(engine) for _ in range(3)] == [{"decoding": 1, "long": 14}] * 3


def test_a_prompt_alone_takes_the_whole_budget() -> None:
    engine = paced_engine(max_num_batched_tokens=64)
    add(engine, "long", 200)
    assert [step_sizes(engine)["long"] for _ in range(4)] == [64, 64, 64, 8]


def test_more_decodes_leave_more_room() -> None:
    engine = paced_engine(max_num_seqs=64)
    for i in range(20):
        add(engine, f"decoding{i}", 1, max_tokens=30, first=i)
    step_sizes(engine)
    add(engine, "long", 100, first=30)
    assert step_sizes(engine)["long"] == 10  # of 1.5 times 20


def test_a_lone_stream_does_not_hold_up_a_crowd() -> None:
    engine = paced_engine(max_num_seqs=64)
    add(engine, "decoding", 4, max_tokens=30)
    step_sizes(engine)
    for i in range(10):
        add(engine, f"prompt{i}", 30, first=100 + i)
    assert step_sizes(engine) == {"decoding": 1} | {f"prompt{i}": 30 for i in range(10)}


def test_who_waits_without_a_place_is_no_crowd() -> None:
    engine = paced_engine(max_num_seqs=2)
    add(engine, "decoding", 4, max_tokens=30)
    step_sizes(engine)
    for i in range(10):
        add(engine, f"prompt{i}", 30, first=100 + i)
    assert step_sizes(engine) == {"decoding": 1, "prompt0": 14}


def test_prompts_beside_decodes_all_come_to_their_end() -> None:
    engine = paced_engine(slowdown=1.0)
    add(engine, "decoding", 4, max_tokens=400)
    step_sizes(engine)
    for i in range(6):
        add(engine, f"prompt{i}", 50, max_tokens=1, first=i)
    for _ in range(100):
        step_sizes(engine)
    assert engine.stats().num_running == 1  # the decode, beside which all have been computed
    assert not engine.stats().num_waiting


def test_a_request_for_many_answers_is_let_in_beside_decodes() -> None:
    engine = paced_engine(max_num_seqs=64)
    add(engine, "decoding", 4, max_tokens=200)
    step_sizes(engine)
    engine.add_request(EngineRequest("many", [1, 2, 3], SamplingParams(n=40, max_tokens=2)))
    for _ in range(5):
        engine.step()
    assert engine.is_unfinished("decoding")
    assert not engine.is_unfinished("many")


@pytest.mark.parametrize(
    "options", [{"free_tokens": None}, {"free_tokens": 10, "max_decode_slowdown": None}], ids=["unmeasured", "off"]
)
def test_no_limit_where_nothing_was_measured_or_none_is_wanted(options: dict[str, Any]) -> None:
    engine, _ = make_engine(num_blocks=600, **options)
    add(engine, "decoding", 4, max_tokens=30)
    step_sizes(engine)
    add(engine, "long", 500, first=30)
    assert step_sizes(engine)["long"] == 500
