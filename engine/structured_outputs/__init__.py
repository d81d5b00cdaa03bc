"""Structured outputs: grammars that limit which tokens may come next, based on llguidance.

Knows a model's tokens, and which of them a grammar allows. Does not know how a token is sampled from them.
"""
