"""Panel: one panel of the dashboard and its Grafana JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from k8s.monitoring.promql import mean, quantile

__all__ = ["BLUE", "DATASOURCE", "GREEN", "ORANGE", "PURPLE", "QUANTILE_COLOURS", "RED", "YELLOW"]
__all__ += ["TOKENS_PER_SECOND", "Json", "Panel", "latency", "stat"]

Json = dict[str, Any]

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GREEN, YELLOW, ORANGE, RED, BLUE, PURPLE = "green", "yellow", "orange", "red", "blue", "purple"
TOKENS_PER_SECOND = "suffix: tok/s"
QUANTILE_COLOURS = {"p50": GREEN, "p90": YELLOW, "p99": RED, "mean": BLUE}


@dataclass(frozen=True)
class Panel:
    """One panel; its position is chosen later.

    ``targets`` are pairs of a legend and an expression; ``thresholds`` are pairs of a value and the colour from it on.
    """

    title: str
    description: str
    unit: str
    targets: Sequence[tuple[str, str]]
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    thresholds: Sequence[tuple[float, str]] = ()
    colours: dict[str, str] = field(default_factory=dict)
    limits: tuple[float | None, float | None] = (0, None)
    stacked: bool = False
    decimals: int | None = None
    base_colour: str = GREEN

    def json(self, number: int, x: int, y: int) -> Json:
        """Return the panel as Grafana's JSON, with its id and position."""
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": self._defaults(), "overrides": self._overrides()},
            "options": self._options(),
            "targets": [
                {
                    "refId": chr(ord("A") + index),
                    "datasource": DATASOURCE,
                    "editorMode": "code",
                    "expr": expression,
                    "legendFormat": legend,
                    "range": True,
                }
                for index, (legend, expression) in enumerate(self.targets)
            ],
        }

    def _defaults(self) -> Json:
        limits = [(None, self.base_colour), *self.thresholds]
        steps = [{"color": colour, "value": value} for value, colour in limits]
        low, high = self.limits
        thresholds = {"mode": "absolute", "steps": steps}
        defaults: Json = {"unit": self.unit, "noValue": "none so far", "thresholds": thresholds}
        defaults |= {"min": low} if low is not None else {}
        defaults |= {"max": high} if high is not None else {}
        defaults |= {"decimals": self.decimals} if self.decimals is not None else {}
        if self.kind == "stat":
            return defaults | {"color": {"mode": "thresholds"}}
        return defaults | {"color": {"mode": "palette-classic"}, "custom": self._lines()}

    def _lines(self) -> Json:
        return {
            "drawStyle": "line",
            "lineInterpolation": "linear",
            "lineWidth": 1,
            "showPoints": "never",
            "spanNulls": False,
            "fillOpacity": 30 if self.stacked else 8,
            "gradientMode": "none",
            "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if self.thresholds else "off"},
        }

    def _overrides(self) -> list[Json]:
        return [
            {
                "matcher": {"id": "byName", "options": name},
                "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
            }
            for name, colour in self.colours.items()
        ]

    def _options(self) -> Json:
        if self.kind == "stat":
            return {
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "colorMode": "value",
                "graphMode": "area",
                "justifyMode": "auto",
                "orientation": "auto",
                "textMode": "auto",
                "wideLayout": True,
            }
        return {
            "legend": {
                "displayMode": "table",
                "placement": "bottom",
                "showLegend": True,
                "calcs": ["mean", "lastNotNull"],
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        }


def latency(title: str, name: str, description: str, thresholds: Sequence[tuple[float, str]] = ()) -> Panel:
    """Return a panel with the quantiles and the mean of a histogram."""
    targets = [(f"p{share * 100:.0f}", quantile(share, name)) for share in (0.5, 0.9, 0.99)]
    targets.append(("mean", mean(name)))
    return Panel(title, description, "s", targets, thresholds=thresholds, colours=QUANTILE_COLOURS)


def stat(title: str, description: str, unit: str, expression: str, **options: Any) -> Panel:
    """Return a panel that shows a single number."""
    return Panel(title, description, unit, [(title, expression)], kind="stat", width=4, height=4, **options)
