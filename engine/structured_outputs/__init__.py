"""Structured outputs: grammars that say which tokens may come next, over llguidance."""
