"""Runners of other engines, each for its own virtual environment, and what all runners, ours too, have in common."""
