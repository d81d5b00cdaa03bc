"""`pagoda top`: the view in a pseudo-terminal, its rates, and its words."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from deployments.cli.top.history import History
from deployments.cli.top.view import render, why
from tests.deployments.cli.fake_server import FakeServer, live
from tests.deployments.cli.terminal import Terminal, run, unwrapped


def test_one_view_in_a_terminal(fake: FakeServer) -> None:
    fake.key = "a-key-of-16-characters"
    code, text = run("top", fake.url, "--once", "--key", fake.key)
    assert code == 0, text
    assert f"fake at {fake.url} · 1 replica · 3 running, 1 waiting, 0 swapped · " in unwrapped(text)
    lines = text.splitlines()
    columns, replica, legend, *_ = lines[next(at for at, line in enumerate(lines) if line.startswith("replica")) :]
    assert columns.split()[:7] == ["replica", "run", "wait", "swap", "tokens/s", "hits", "preempted"]
    assert replica.split()[:4] == ["abc12345", "3", "1", "0"]
    assert f"{'█' * 14}{'▒' * 4}{'·' * 2}  70% of 100" in replica
    assert "cached" in legend
    assert lines[-1].split()[1:6] == ["abc12345", "90", "64", "160", "ms"]
    assert lines[-1].rstrip().endswith("holds the most of its prompt; next best 200 ms")


def test_the_live_view_follows_the_server_and_survives_its_absence(fake: FakeServer) -> None:
    with Terminal("top", fake.url, "--interval", "0.2") as terminal:
        terminal.wait_for("3 running")
        fake.answers["/live"] = live(time=fake.answers["/live"]["time"] + 1, model="another")
        at = terminal.wait_for("another at")
        fake.answers["/live"] = (503, {"error": {"message": "no replica"}})
        at = terminal.wait_for("answers 503: no replica", after=at)
        fake.answers["/live"] = live(model="again")
        terminal.wait_for("again at", after=at)
        terminal.interrupt()
        assert terminal.wait() == 0
    assert "\x1b[?1049l" in terminal.raw  # the screen that was there before is shown again


def test_a_server_without_a_live_view(fake: FakeServer) -> None:
    del fake.answers["/live"]
    code, text = run("top", fake.url)
    assert (code, text) == (
        1,
        f"pagoda: {fake.url} has no live view; start it with `web: true` and `task: generate`\n",
    )


def _at(time: float, generated: int, queried: int, hit: int, name: str = "a") -> dict[str, Any]:
    counters = {"generated_tokens": generated, "query_tokens": queried, "hit_tokens": hit}
    return {"time": time, "replicas": [{"name": name} | counters]}


def test_rates_are_differences_of_the_counters() -> None:
    history = History()
    assert history.add(_at(100.0, 1000, 50, 0))
    assert history.rate(["a"]) is None
    assert history.add(_at(101.0, 1010, 50, 0))
    assert (history.rate(["a"]), history.hit_rate(["a"])) == (10.0, None)
    assert not history.add(_at(100.5, 0, 0, 0))  # of an ingress that lags
    for second in range(2, 12):
        generated = 1000 + 10 * second + 10 * max(0, second - 8)
        history.add(_at(100.0 + second, generated, 50 + second, second // 2))
    assert history.rate(["a"]) == 20.0  # of the last seconds only
    assert history.hit_rate(["a"]) == pytest.approx(5 / 11)
    assert history.add(_at(112.0, 5, 5, 0, name="b"))
    assert (history.rate(["a", "b"]), history.rate(["a"])) == (None, None)


NO_BLOCKS = {"free": 0, "cached": 0, "used": 0, "shared": 0}


@pytest.mark.parametrize("blocks", [NO_BLOCKS | {"free": 999, "cached": 1}, NO_BLOCKS], ids=["full", "none"])
def test_bars_have_one_width(blocks: dict[str, int]) -> None:
    state, console = live(routed=[]), Console(file=io.StringIO(), width=120)
    state["replicas"][0] |= {"blocks": blocks, "num_blocks": sum(blocks.values())}
    console.print(render(state, History(), "u", 5))
    [line] = [line for line in console.file.getvalue().splitlines() if "abc12345" in line]  # type: ignore[attr-defined]
    assert sum(line.count(character) for character in "█▒·") == 20


def test_tiers_beyond_the_device_have_a_line_each() -> None:
    state, console = live(routed=[]), Console(file=io.StringIO(), width=120)
    counters = {"hit_tokens": 32, "in_tokens": 4800, "out_tokens": 160}
    state["replicas"][0]["tiers"] = [
        {"name": "host", "blocks": 10, "num_blocks": 20, **counters},
        {"name": "peer", "blocks": 0, "num_blocks": 0, **counters},
    ]
    console.print(render(state, History(), "u", 5))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    host, peer = (line for line in lines if " host " in line or " peer " in line)
    assert host.split() == ["abc12345", "host", "4,800", "160", "32", "▒" * 10 + "·" * 10, "50%", "of", "20"]
    assert peer.split() == ["abc12345", "peer", "4,800", "160", "32"]
    console = Console(file=io.StringIO(), width=60)
    console.print(render(state, History(), "u", 5))
    assert all(len(line) <= 60 for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


def test_numbers_stay_whole_in_a_narrow_terminal() -> None:
    console = Console(file=io.StringIO(), width=60)
    console.print(render(live(), History(), "u", 5))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    [columns] = [line.split() for line in lines if line.startswith("replica")]
    assert columns[:7] == ["replica", "run", "wait", "swap", "tokens/s", "hits", "preempted"]
    assert all(len(line) <= 60 for line in lines)


@pytest.mark.parametrize("outcome", ["hit", "cold", "balanced", "retry", "fallback"])
def test_each_outcome_of_the_router_has_its_words(outcome: str) -> None:
    words = why(live()["routed"][0] | {"outcome": outcome, "next_s": None})
    assert len(words.split()) > 4
    assert outcome not in words.split()
