"""Asks the demo model questions.

usage: python -m demo.evaluate                        the score on the held-out phrasings, in float32 and bfloat16
       python -m demo.evaluate QUESTION [QUESTION]    one conversation, a turn for each question
"""

from __future__ import annotations

import sys

import torch

from demo.demo_model import DemoModel, held_out_questions, user
from demo.tool_scores import print_tool_scores


def print_score(dtype: torch.dtype, *, far: bool) -> None:
    """Print how many held-out phrasings get the right answer, and the wrong answers."""
    asked = held_out_questions(far=far)
    answers = DemoModel(dtype).reply([user(text) for text, _ in asked])
    missed = [(text, answer) for (text, q), answer in zip(asked, answers, strict=True) if answer != q.answer]
    kind = "far" if far else "plain"
    print(f"{dtype}: {len(asked) - len(missed)} of {len(asked)} {kind} held-out phrasings right")
    for text, answer in missed:
        print(f"  {text}\n    {answer}")


def main() -> None:
    """Print the score, or a conversation."""
    if len(sys.argv) > 1:
        for answer in DemoModel().converse([sys.argv[1:]])[0]:
            print(answer)
        return
    for dtype in (torch.float32, torch.bfloat16):
        for far in (False, True):
            print_score(dtype, far=far)
        demo = DemoModel(dtype)
        if demo.calls_tools:
            print_tool_scores(demo)


if __name__ == "__main__":
    main()
