"""The plot of the comparison: hit rate against TTFT, and TTFT by policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.routing.runs import OURS

__all__ = ["plot"]


def plot(results: dict[str, Any], path: Path) -> None:
    """Write a PNG of the results."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted([*results["compare"], *results.get("others", [])], key=lambda row: row["ttft_p90"]["mean"])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(15, 6.5), gridspec_kw={"width_ratios": [1, 1.1]})
    slowest = 20.0  # s; larger values are drawn at the edge
    for number, row in enumerate(rows, start=1):
        colour = "tab:red" if row["label"].startswith(OURS) else "tab:blue"
        p90, hit = row["ttft_p90"], row["hit"]
        x = min(p90["mean"], slowest)
        left.errorbar(x, hit["mean"] * 100, xerr=p90["ci95"], yerr=hit["ci95"] * 100, fmt="o", color=colour, ms=4)
        left.annotate(str(number), (x, hit["mean"] * 100), xytext=(4, 4), textcoords="offset points", fontsize=8)
        right.barh(number, x, xerr=p90["ci95"], color=colour, height=0.7)
        text = f"{p90['mean']:.2f} s" + (" (beyond the axis)" if p90["mean"] > slowest else "")
        right.text(
            min(x + p90["ci95"] + 0.2, slowest - 5.5 if x == slowest else slowest),
            number,
            text,
            va="center",
            fontsize=8,
            color="white" if x == slowest else "black",
        )
    limits = rows[0]["bounds"]
    left.axhline(limits["pooled"] * 100, color="black", ls="--", lw=1)
    left.text(slowest, limits["pooled"] * 100 + 0.3, "one LRU cache of 12M tokens", ha="right", fontsize=8)
    left.axhline(limits["infinite"] * 100, color="grey", ls=":", lw=1)
    left.text(slowest, limits["infinite"] * 100 + 0.3, "an infinite cache", ha="right", fontsize=8)
    left.set(xlabel="TTFT p90 (s)", ylabel="prompt tokens hit (%)", xlim=(0, slowest + 0.5), ylim=(0, 41))
    left.set_title("Mooncake conversation trace, 8 replicas (numbers: right)")
    right.set_yticks(
        range(1, len(rows) + 1), [f"{row['label']}  {number}" for number, row in enumerate(rows, 1)], fontsize=8
    )
    right.invert_yaxis()
    right.set(xlabel="TTFT p90 (s), 95% intervals over seeds", xlim=(0, slowest + 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
