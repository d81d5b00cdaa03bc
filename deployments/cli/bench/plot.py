"""write_plot: the run as an SVG: how TTFT, ITL and E2E are distributed, and tokens a second over time.

The file needs no library, so that a plot is made wherever the command runs; browsers and editors show it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from deployments.cli.bench.http import Outcome
from deployments.cli.bench.load import Run
from engine.errors import ConfigError

__all__ = ["write_plot"]

WIDTH, HEIGHT, MARGIN = 420, 240, 52  # of a panel
POINTS = 200  # of a curve
_STYLE = (
    "text{font:12px sans-serif;fill:#333}.title{font-weight:bold}.grid{stroke:#ddd}"
    ".curve{fill:none;stroke:#1f6feb;stroke-width:1.5}"
)

Points = Sequence[tuple[float, float]]


def write_plot(path: Path, run: Run, title: str) -> None:
    """Write four panels to an SVG file.

    Raises:
        ConfigError: the file cannot be written.
    """
    done = [outcome for outcome in run.outcomes if not outcome.error and outcome.arrivals]
    gaps = [gap for outcome in done for gap in np.diff(np.asarray(outcome.arrivals))]
    panels = [
        _panel("first token (TTFT)", "ms", "share of answers", _distribution([item.ttft_s for item in done])),
        _panel("between two events (ITL)", "ms", "share of gaps", _distribution(gaps)),
        _panel("whole answer (E2E)", "ms", "share of answers", _distribution([item.e2e_s for item in done])),
        _panel("throughput", "s", "tokens/s", _rates(done, run.started_at, run.ended_at)),
    ]
    placed = [
        f'<g transform="translate({index % 2 * WIDTH},{30 + index // 2 * HEIGHT})">{panel}</g>'
        for index, panel in enumerate(panels)
    ]
    size = f'width="{2 * WIDTH}" height="{2 * HEIGHT + 30}"'
    head = f'<text class="title" x="{MARGIN}" y="20">{escape(title)}</text>'
    document = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>'
        f'<rect width="100%" height="100%" fill="white"/>{head}{"".join(placed)}</svg>\n'
    )
    try:
        path.write_text(document, encoding="utf-8")
    except OSError as error:
        problem, remedy = f"cannot be written ({error.strerror})", "give a file in a directory that you can write"
        raise ConfigError(problem, param="--plot", value=str(path), remedy=remedy) from None


def _distribution(seconds: Sequence[float]) -> Points:
    """Return the cumulative distribution: milliseconds, and the share of values up to them."""
    if not len(seconds):
        return ()
    shares = np.linspace(0, 1, POINTS)
    return list(zip((1e3 * np.quantile(seconds, shares)).tolist(), shares.tolist(), strict=True))


def _rates(done: Sequence[Outcome], start: float, end: float) -> Points:
    """Return the tokens a second over time; an event's tokens are the mean of its answer."""
    if not done:
        return ()
    times = np.concatenate([np.asarray(outcome.arrivals) - start for outcome in done])
    weights = np.concatenate(
        [np.full(len(outcome.arrivals), outcome.num_tokens / len(outcome.arrivals)) for outcome in done]
    )
    counts, edges = np.histogram(times, min(60, max(1, len(times) // 20)), (0, max(end - start, 1e-9)), weights=weights)
    width = edges[1] - edges[0]
    return list(zip((edges[:-1] + width / 2).tolist(), (counts / width).tolist(), strict=True))


def _panel(title: str, unit: str, label: str, points: Points) -> str:
    """Return one panel: axes from 0 with a few round ticks, and the curve."""
    left, bottom, right, top = MARGIN, HEIGHT - 40, WIDTH - 16, 24
    parts = [f'<text class="title" x="{left}" y="14">{escape(title)}</text>']
    parts.append(f'<text x="{right}" y="{bottom + 32}" text-anchor="end">{unit}</text>')
    parts.append(f'<text x="{right}" y="14" text-anchor="end">{label}</text>')
    if not points:
        return "".join([*parts, f'<text x="{left}" y="{HEIGHT // 2}">no data</text>'])
    most_x, most_y = (max(values) or 1.0 for values in zip(*points, strict=True))
    for tick in _ticks(most_x):
        x = left + (right - left) * tick / most_x
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    for tick in _ticks(most_y):
        y = bottom - (bottom - top) * tick / most_y
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    curve = " ".join(
        f"{left + (right - left) * x / most_x:.1f},{bottom - (bottom - top) * y / most_y:.1f}" for x, y in points
    )
    return "".join([*parts, f'<polyline class="curve" points="{curve}"/>'])


def _ticks(most: float) -> list[float]:
    """Return at most six round numbers from 0 to ``most``."""
    magnitude = 10.0 ** math.floor(math.log10(most))
    step = next(step for step in (0.1, 0.2, 0.5, 1, 2) if most / (step * magnitude) <= 5.5) * magnitude
    return [round(step * index, 12) for index in range(int(most / step + 1e-9) + 1)]
