"""Check that the subjects of new commits fit 72 characters: those since the last tag, or the last 50 if they are fewer.

Longer subjects up to BASE are history. Where git is missing, or this is not a clone, nothing is checked.
"""

from __future__ import annotations

import subprocess
import sys

MAX_LENGTH, MAX_COMMITS = 72, 50
BASE = "077e74bbe24f8aa2d0e3d470a68a9f8559045a64"


def git(*arguments: str) -> str:
    """Return what a command of git prints; empty if it fails."""
    result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""


def new_commits() -> list[str]:
    """Return the abbreviated hash and the subject of each commit to check, newest first."""
    known = [commit for commit in (git("describe", "--tags", "--abbrev=0"), BASE) if git("cat-file", "-t", commit)]
    log = git("log", "--no-merges", f"--max-count={MAX_COMMITS}", "--format=%h %s", "HEAD", *(f"^{c}" for c in known))
    return log.splitlines()


def main() -> int:
    """Return 1 and name the commits if some subjects are too long."""
    try:
        commits = new_commits()
    except FileNotFoundError:
        print("commit subjects: not checked, git is not installed")
        return 0
    too_long = [line for line in commits if len(line.partition(" ")[2]) > MAX_LENGTH]
    for line in too_long:
        print(f"commit subject longer than {MAX_LENGTH} characters: {line}")
    if not too_long:
        print(f"commit subjects: {len(commits)} checked" if commits else "commit subjects: none to check here")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
