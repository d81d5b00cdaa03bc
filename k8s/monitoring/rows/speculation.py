"""Speculative decoding: what is drafted, by whom, and how much of it is right."""

from __future__ import annotations

from k8s.monitoring.panels import TOKENS_PER_SECOND, Panel
from k8s.monitoring.promql import engine, rate

__all__ = ["SPECULATION"]

DRAFTS, DRAFTED, ACCEPTED = (
    rate(engine(f"spec_decode_num_{what}_total"), "drafter") for what in ("drafts", "draft_tokens", "accepted_tokens")
)

POSITIONS = [
    rate(engine(f"spec_decode_num_{what}_tokens_per_pos_total"), "drafter, position") for what in ("accepted", "draft")
]

SPECULATION = [
    Panel(
        "Accepted draft tokens",
        "Tokens per second that sequences got in addition to the one of each step, by drafter.",
        TOKENS_PER_SECOND,
        [("{{drafter}}", ACCEPTED)],
        stacked=True,
    ),
    Panel(
        "Acceptance rate",
        "Share of draft tokens that were accepted, by drafter. Where it is low, few tokens are drafted.",
        "percentunit",
        [("{{drafter}}", f"{ACCEPTED} / {DRAFTED}")],
        limits=(0, 1),
    ),
    Panel(
        "Length of drafts",
        "Mean draft tokens of a sequence in a step with a draft, and how many of them were accepted, by drafter.",
        "suffix: tok",
        [("{{drafter}} drafted", f"{DRAFTED} / {DRAFTS}"), ("{{drafter}} accepted", f"{ACCEPTED} / {DRAFTS}")],
    ),
    Panel(
        "Acceptance by position",
        "Share of draft tokens that were accepted, by drafter and position in the draft: all before it were, too.",
        "percentunit",
        [("{{drafter}} {{position}}", f"{POSITIONS[0]} / {POSITIONS[1]}")],
        limits=(0, 1),
    ),
    Panel(
        "Saved steps",
        "Steps per second that would have given the same tokens without drafts, beyond those that were computed.",
        "suffix: steps/s",
        [("saved", rate(engine("spec_decode_saved_steps_total")))],
    ),
    Panel(
        "Time of drafting",
        "Share of a second in which each drafter makes drafts, or looks for them; steps wait for it.",
        "percentunit",
        [("{{drafter}}", rate(engine("spec_decode_drafting_seconds_total"), "drafter"))],
    ),
]
