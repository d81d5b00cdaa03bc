"""View: what `pagoda top` shows of one answer of GET /live."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deployments.cli.top.history import History

__all__ = ["render", "why"]

BAR = 20  # characters
_STATES = (("private", "█", "blue"), ("shared", "█", "magenta"), ("cached", "▒", "cyan"), ("free", "·", "dim"))
_NUMBERS = {"justify": "right", "no_wrap": True}


def render(state: dict[str, Any], history: History, url: str, num_routed: int) -> RenderableType:
    """Return the whole view.

    Args:
        state: of GET /live, which ``history`` has got.
        history: of the counters.
        url: of the server.
        num_routed: most recent requests that are shown.
    """
    parts: list[RenderableType] = [_head(state, history, url), Text(), _replicas(state, history), _legend()]
    if any(replica.get("tiers") for replica in state["replicas"]):
        parts += [Text(), _tiers(state)]
    if state["routed"]:
        parts += [Text(), _routed(state["routed"][:num_routed])]
    return Group(*parts)


def _head(state: dict[str, Any], history: History, url: str) -> Text:
    replicas = state["replicas"]
    names = [replica["name"] for replica in replicas]
    running, waiting, swapped = (sum(replica[key] for replica in replicas) for key in ("running", "waiting", "swapped"))
    parts = [
        f"{state['model']} at {url}",
        f"{len(replicas)} replica{'s' * (len(replicas) != 1)}",
        f"{running} running, {waiting} waiting, {swapped} swapped",
        f"{_rate(history.rate(names))} tokens/s",
        f"hit rate {_share(history.hit_rate(names))}",
        time.strftime("%H:%M:%S", time.localtime(state["time"])),
    ]
    return Text(" · ".join(parts), style="bold", overflow="fold")


def _replicas(state: dict[str, Any], history: History) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("replica", no_wrap=True)
    for column in ("run", "wait", "swap", "tokens/s", "hits", "preempted"):
        table.add_column(column, **_NUMBERS)  # type: ignore[arg-type]
    table.add_column("KV blocks of the device")  # the only one that gets narrower where there is no room
    for replica in state["replicas"]:
        name = replica["name"]
        numbers = [str(replica[key]) for key in ("running", "waiting", "swapped")]
        numbers += [_rate(history.rate([name])), _share(history.hit_rate([name])), str(replica["preemptions"])]
        table.add_row(name, *numbers, _bar(replica))
    if not state["replicas"]:
        table.add_row("none")
    return table


def _bar(replica: dict[str, Any]) -> Text:
    """Return a bar of a replica's KV blocks by state; a state that has blocks has at least a character."""
    blocks, total = replica["blocks"], max(1, replica["num_blocks"])
    counts = {"private": blocks["used"] - blocks["shared"]} | {key: blocks[key] for key in ("shared", "cached", "free")}
    widths = {name: max(round(BAR * count / total), int(count > 0)) for name, count in counts.items()}
    largest = max(widths, key=lambda name: widths[name])
    widths[largest] += BAR - sum(widths.values())
    bar = Text(no_wrap=True, overflow="ellipsis")
    for name, character, style in _STATES:
        bar.append(character * widths[name], style=style)
    return bar.append(f" {blocks['used'] / total:4.0%} of {replica['num_blocks']:,}")


def _legend() -> Text:
    legend = Text("KV blocks: ", style="dim")
    for name, character, style in _STATES:
        legend.append(character, style=style).append(f" {name}  ")
    return legend


def _tiers(state: dict[str, Any]) -> Table:
    """Return what the tiers beyond the devices hold, and what has moved since the replicas started."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("replica", no_wrap=True)
    table.add_column("tier", no_wrap=True)
    for column in ("KV in", "KV out", "hits"):
        table.add_column(column, **_NUMBERS)  # type: ignore[arg-type]
    table.add_column("tokens since the start; blocks")  # the only one that gets narrower where there is no room
    for replica in state["replicas"]:
        for tier in replica.get("tiers", []):
            numbers = [f"{tier[key]:,}" for key in ("in_tokens", "out_tokens", "hit_tokens")]
            table.add_row(replica["name"], tier["name"], *numbers, _tier_bar(tier))
    return table


def _tier_bar(tier: dict[str, Any]) -> Text:
    """Return a bar of how full a tier is; what peers hold is theirs."""
    bar, total = Text(no_wrap=True, overflow="ellipsis"), tier["num_blocks"]
    if not total:
        return bar
    width = max(round(BAR * min(1.0, tier["blocks"] / total)), int(tier["blocks"] > 0))
    bar.append("▒" * width, style="cyan").append("·" * (BAR - width), style="dim")
    return bar.append(f" {tier['blocks'] / total:4.0%} of {total:,}")


def _routed(routed: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("routed", no_wrap=True)
    table.add_column("to", no_wrap=True)
    table.add_column("prompt", **_NUMBERS)  # type: ignore[arg-type]
    table.add_column("cached", **_NUMBERS)  # type: ignore[arg-type]
    table.add_column("cost", **_NUMBERS)  # type: ignore[arg-type]
    table.add_column("why")  # the only one that gets narrower where there is no room
    for item in routed:
        cost = item["queue_s"] + item["prefill_s"] + item["others_s"] + item["decode_s"]
        clock = time.strftime("%H:%M:%S", time.localtime(item["time"]))
        numbers = (f"{item['prompt_tokens']:,}", f"{item['predicted_tokens']:,}", _duration(cost))
        table.add_row(clock, item["replica"], *numbers, Text(why(item), no_wrap=True, overflow="ellipsis"))
    return table


def why(item: dict[str, Any]) -> str:
    """Return in words why a request went where it did: the router's outcome, and what the next best had cost."""
    match item["outcome"]:
        case "hit":
            reason = "holds the most of its prompt"
        case "cold":
            reason = "no replica holds a part of it"
        case "balanced":
            reason = f"cheaper than the one that holds {item['best_tokens']:,}"
        case "retry":
            reason = "sent again: its replica was lost or refused it"
        case "fallback":
            reason = "shorter than a KV block: nothing to match"
        case other:
            reason = str(other)
    return reason if item["next_s"] is None else f"{reason}; next best {_duration(item['next_s'])}"


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
