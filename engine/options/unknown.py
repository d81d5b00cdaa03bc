"""hint: what an option that does not exist was probably meant to be."""

from __future__ import annotations

import difflib

__all__ = ["hint"]


def hint(name: object, known: list[str]) -> str:
    """Return the option that was probably meant, or all of them."""
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known options: {', '.join(known)}"
