"""The KV memory figures: invariants of the comparison, and its parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kv_memory.buddy_allocator import BuddyAllocator
from benchmarks.kv_memory.length_traces import DATASETS, Lengths, read_trace, synthetic_trace
from benchmarks.kv_memory.occupancy import next_power_of_two, simulate_contiguous
from benchmarks.kv_memory.sharing import SharedBlocks, beam_search_savings, parallel_savings
from benchmarks.kv_utilization import main, measure_utilization

MAXIMUM, POW2, ORACLE, SMALL, LARGE = (
    "contiguous, maximum",
    "contiguous, power of two",
    "contiguous, oracle",
    "blocks of 16",
    "blocks of 256",
)


def test_known_lengths_and_smaller_blocks_waste_less_memory() -> None:
    requests = synthetic_trace("sharegpt", 300, max_length=2048, seed=1)
    results = measure_utilization(requests, 15728, 2048)
    shares = {name: occupancy.shares() for name, occupancy in results.items()}
    for key in ("tokens", "tokens_of_allocated"):
        assert shares[SMALL][key] >= shares[ORACLE][key] >= shares[POW2][key] >= shares[MAXIMUM][key] > 0
        assert shares[SMALL][key] >= shares[LARGE][key]
        assert 0.9 < shares[SMALL][key] <= 1
    for name, share in shares.items():
        uses = [share[use] for use in ("tokens", "reserved", "internal", "external", "free")]
        assert all(0 <= use <= 1 for use in uses), name
        assert sum(uses) == pytest.approx(1), name
    assert shares[ORACLE]["internal"] == 0
    assert shares[MAXIMUM]["mean_batch"] == 7  # pieces of 2048 in 15,728 slots


def test_one_request_at_a_time_is_counted_slot_by_slot() -> None:
    """Ten equal requests, a pool for one: prompt 2, answer 3, so 2, 3 and 4 slots hold tokens in its three steps."""
    requests = [Lengths(2, 3)] * 10
    oracle, pow2, maximum = (simulate_contiguous(requests, 8, lambda _, size=size: size) for size in (5, 6, 8))
    cycles = oracle.steps // 3
    assert oracle.steps == 7 * 3  # two requests warm up, and none waits for the last
    assert oracle.tokens == pow2.tokens == maximum.tokens == cycles * (2 + 3 + 4)
    assert oracle.reserved == pow2.reserved == maximum.reserved == cycles * (3 + 2 + 1)
    assert (oracle.internal, oracle.external, oracle.free) == (0, 3 * oracle.steps, 0)
    assert (pow2.internal, pow2.external) == (1 * pow2.steps, 2 * pow2.steps)
    assert (maximum.internal, maximum.external) == (3 * maximum.steps, 0)


@settings(max_examples=100, deadline=None)
@given(pool=st.integers(1, 300), actions=st.lists(st.one_of(st.integers(1, 64), st.just(0)), max_size=60))
def test_buddies_never_overlap_and_merge_again(pool: int, actions: list[int]) -> None:
    allocator = BuddyAllocator(pool)
    pieces: dict[int, int] = {}
    for size in actions:
        if size == 0 and pieces:
            address = list(pieces)[-1 if len(pieces) % 2 else 0]  # now the newest, now the oldest
            del pieces[address]
            allocator.free(address)
        elif size:
            taken_at = allocator.allocate(size)
            if taken_at is not None:
                pieces[taken_at] = next_power_of_two(size)
        taken = [slot for address, length in pieces.items() for slot in range(address, address + length)]
        assert len(set(taken)) == len(taken)
        assert not taken or max(taken) < pool
        assert allocator.num_free == pool - len(taken)
    for address in pieces:
        allocator.free(address)
    fresh = BuddyAllocator(pool)
    assert allocator._free == fresh._free


def test_a_pool_too_small_or_too_large_is_rejected() -> None:
    with pytest.raises(ValueError, match="no room for a piece of 2048; raise --pool-tokens"):
        measure_utilization([Lengths(10, 10)], 1000, 2048)
    with pytest.raises(ValueError, match="no request waits for the 100000 tokens"):
        measure_utilization([Lengths(10, 10)] * 3, 100000, 2048)


def test_parallel_samples_share_the_prompts_full_blocks() -> None:
    """A prompt of 10 in blocks of 4 and two answers of 2: 3 blocks for both, then 2 shared and one each."""
    saved = parallel_savings([Lengths(10, 2)], 2, SharedBlocks(4, 16, 2))
    assert saved == 1 - (3 + 4) / (6 + 6)


def test_copy_on_write_leaves_the_block_to_its_last_owner() -> None:
    pool = SharedBlocks(4, 64, 4)
    first = pool.add(6)
    second, third = pool.fork(first), pool.fork(first)
    assert pool.num_used == 2
    for sequence, used in ((first, 3), (second, 4), (third, 4)):
        pool.append(sequence)
        assert pool.num_used == used
    pool.free(first)
    pool.free(third)
    assert pool.num_used == 2
    pool.free(second)
    assert pool.num_used == 0


def test_beams_share_more_than_samples_and_wide_ones_more_than_narrow_ones() -> None:
    requests = synthetic_trace("sharegpt", 30, max_length=512, seed=3)
    for width in (2, 4):
        pools = [SharedBlocks(16, 2048, 6) for _ in range(3)]
        samples = parallel_savings(requests, width, pools[0])
        beams = beam_search_savings(requests, width, pools[1], seed=0)
        wider = beam_search_savings(requests, width + 2, pools[2], seed=0)
        assert 0 < samples < beams < wider < 1
        assert beams < 1 - 1 / width  # all blocks shared, always
        assert all(pool.num_used == 0 for pool in pools)


@pytest.mark.parametrize("dataset", sorted(DATASETS))
def test_synthetic_lengths_have_the_documented_means(dataset: str) -> None:
    trace = synthetic_trace(dataset, 3000, max_length=2048, seed=0)
    assert trace == synthetic_trace(dataset, 3000, max_length=2048, seed=0)
    assert trace != synthetic_trace(dataset, 3000, max_length=2048, seed=1)
    prompt, output = DATASETS[dataset]
    assert sum(request.prompt for request in trace) / 3000 == pytest.approx(prompt, rel=0.01)
    assert sum(request.output for request in trace) / 3000 == pytest.approx(output, rel=0.01)
    assert max(request.total for request in trace) <= 2048
    assert min(min(request.prompt, request.output) for request in trace) >= 1


def test_a_trace_is_read_to_its_limit_and_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 5, "output_length": 2}\n{"input_length": 7, "output_length": 0}\n'
    )
    assert read_trace(path, limit=1) == [Lengths(5, 2)]
    with pytest.raises(ValueError, match=r"line 2: .* has a length below 1"):
        read_trace(path, limit=2)
    path.write_text('{"input_length": 5}\n')
    with pytest.raises(ValueError, match="line 1: .*output_length.*; give input_length and output_length"):
        read_trace(path, limit=1)


def test_the_command_prints_a_table_and_writes_its_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "result.json"
    requests = synthetic_trace("alpaca", 200, max_length=256, seed=0)
    lines = [json.dumps({"input_length": request.prompt, "output_length": request.output}) for request in requests]
    trace.write_text("\n".join(lines))
    arguments = ["--trace", str(trace), "--max-length", "256", "--pool-tokens", "2048", "--out", str(out)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for name in (MAXIMUM, POW2, ORACLE, SMALL, LARGE, "beam"):
        assert name in printed
    result = json.loads(out.read_text())
    assert result["machine"]["cpu"]
    assert result["workload"]["requests"] == 200
    assert result["utilization"][SMALL]["tokens_of_allocated"] > result["utilization"][MAXIMUM]["tokens_of_allocated"]
    assert set(result["sharing"]["saved"]["trace.jsonl"]["16"]["beam"]) == {"2", "4", "6"}


def test_a_users_mistake_is_reported_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--trace", str(tmp_path / "none.jsonl")])
    assert exit_info.value.code == 2
    assert "none.jsonl" in capsys.readouterr().err
